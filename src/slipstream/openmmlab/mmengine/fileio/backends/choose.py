"""Storage backend selection."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slipstream.errors import ConfigError
from slipstream.openmmlab.mmengine.fileio.backends.fsspec_backend import FsspecBackend
from slipstream.openmmlab.mmengine.fileio.backends.local_backend import LocalBackend

__all__ = ["backends", "get_file_backend"]

backends: Mapping[str, type[Any]] = MappingProxyType({"local": LocalBackend, "LocalBackend": LocalBackend})
"""Maps backend names to the classes for local files."""


def get_file_backend(
    uri: str | Path | None = None,
    *,
    backend_args: Mapping[str, Any] | None = None,
    enable_singleton: bool = False,
    backend_key: str | None = None,
) -> Any:
    """Return the backend that `backend_args["backend"]` specifies or, if this key is not set, the backend for a path.

    Args:
        uri: a path or URL; its prefix (such as `s3://`) selects a file system supported by fsspec.
        backend_args: `backend` (`local`, or an fsspec protocol) and the options for the backend.
        enable_singleton: has no effect, because the backends in this package are stateless.
        backend_key: has no effect.

    Raises:
        ConfigError: if the backend is supported only by MMEngine.
    """
    options = dict(backend_args or {})
    prefix = str(uri).split("://")[0] if uri is not None and "://" in str(uri) else "local"
    name = options.pop("backend", None) or prefix
    if name in ("petrel", "memcached", "lmdb"):
        raise ConfigError(
            f"the storage backend '{name}' is not supported; use local files or an fsspec protocol such as 's3'"
        )
    if name in ("local", "disk", "LocalBackend", "HardDiskBackend"):
        return LocalBackend()
    return FsspecBackend("https" if name == "http" else name, **options)
