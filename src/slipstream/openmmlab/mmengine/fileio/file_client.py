"""`FileClient`, a legacy interface to storage backends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.openmmlab.mmengine.fileio.backends import get_file_backend

__all__ = ["FileClient"]


class FileClient:
    """A storage backend with MMEngine's legacy interface.

    Args:
        backend: name of the backend; see `get_file_backend`.
        prefix: path prefix that selects the backend.
        **kwargs: options for the backend.
    """

    def __init__(self, backend: str | None = None, prefix: str | None = None, **kwargs: Any) -> None:
        uri = None if prefix is None else f"{prefix}://"
        self.client = get_file_backend(uri, backend_args={"backend": backend or prefix, **kwargs})

    @classmethod
    def infer_client(
        cls, file_client_args: Mapping[str, Any] | None = None, uri: str | Path | None = None
    ) -> FileClient:
        """Return a client built from `file_client_args` or, if this argument is None, a client for the path `uri`."""
        if file_client_args is not None:
            return cls(**file_client_args)
        return cls(prefix=str(uri).split("://")[0] if "://" in str(uri) else None)

    def __getattr__(self, name: str) -> Any:
        if name == "client":
            raise AttributeError(name)
        return getattr(self.client, name)
