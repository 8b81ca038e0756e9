"""Changes to modules of the installed MMEngine: no code is executed from checkpoints, and no package is installed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from slipstream.checkpoint import download_checkpoint, newest_checkpoints
from slipstream.checkpoint import load_checkpoint as read_checkpoint
from slipstream.checkpoint import save_checkpoint as write_checkpoint
from slipstream.errors import CheckpointError, MissingPackageError
from slipstream.files import atomic_write
from slipstream.logging import print_log
from slipstream.model import convert_sync_batchnorm, revert_sync_batchnorm

__all__ = ["patch_checkpoint", "patch_data_elements", "patch_model_utils", "patch_packages"]


def patch_checkpoint(module: ModuleType) -> None:
    """Read checkpoints without executing code from them, and write them atomically."""
    module.load_from_local = load_from_local  # type: ignore[attr-defined]
    module.load_from_http = load_from_http  # type: ignore[attr-defined]
    module.save_checkpoint = save_checkpoint  # type: ignore[attr-defined]
    module.find_latest_checkpoint = find_latest_checkpoint  # type: ignore[attr-defined]
    loader: Any = module.CheckpointLoader
    for prefix, name in {
        "": "load_from_local",
        "http://": "load_from_http",
        "https://": "load_from_http",
    }.items():
        loader.register_scheme(prefix, getattr(module, name), force=True)
    for prefix, function in loader._schemes.items():
        if function.__name__ in ("load_from_ceph", "load_from_pavi"):
            loader.register_scheme(prefix, _refuse, force=True)


def load_from_local(filename: str, map_location: Any = None) -> Any:
    """Read a local checkpoint without executing code from it.

    Raises:
        FileNotFoundError: if the file does not exist.
    """
    path = Path(filename).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"the checkpoint {path} does not exist; check the path")
    return read_checkpoint(path, "cpu" if map_location is None else map_location)


def load_from_http(filename: str, map_location: Any = None, model_dir: str | None = None, **_: Any) -> Any:
    """Download a checkpoint to the `torch.hub` cache, and read it without executing code from it."""
    folder = Path(model_dir or Path(torch.hub.get_dir()) / "checkpoints")
    target = folder / filename.rsplit("/", 1)[-1]
    if not target.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(target) as temporary:
            download_checkpoint(filename, temporary)
    return load_from_local(str(target), map_location)


def _refuse(filename: str, map_location: Any = None, **_: Any) -> Any:
    raise CheckpointError(
        f"{filename} cannot be read without executing code from it; download the file first"
    )


def save_checkpoint(
    checkpoint: Mapping[str, Any], filename: str, file_client_args: Any = None, backend_args: Any = None
) -> None:
    """Write a checkpoint to a local file atomically. Values that are neither tensors nor built-in types are omitted."""
    write_checkpoint(checkpoint, filename, lambda line: print_log(line, "current", logging.WARNING))


def find_latest_checkpoint(path: str) -> str | None:
    """Return the path of the newest checkpoint in a folder, or None if there is none."""
    found = next(newest_checkpoints(path), None)
    return str(found) if found else None


def patch_packages(module: ModuleType) -> None:
    """Find a library by the name of its module, because packages have several names, and never install one.

    MMEngine looks for the package `mmsegmentation`, whose maintained version is called `onedl-mmsegmentation`.
    """

    def spec(package: str) -> ModuleSpec | None:
        from mmengine.config.utils import MODULE2PACKAGE

        names = {package: module for module, package in MODULE2PACKAGE.items()}
        return find_spec(names.get(package, package.replace("-", "_")))

    def is_installed(package: str) -> bool:
        return spec(package) is not None or any(metadata.distributions(name=package))

    def get_installed_path(package: str) -> str:
        found = spec(package)
        if found is None or found.origin is None:
            raise MissingPackageError(f"the package '{package}' is not installed; install it with pip")
        return str(Path(found.origin).parent)

    module.is_installed = is_installed  # type: ignore[attr-defined]
    module.get_installed_path = get_installed_path  # type: ignore[attr-defined]
    module.install_package = get_installed_path  # type: ignore[attr-defined]


def patch_data_elements(module: ModuleType) -> None:
    """Let a compiled step receive the tensors of data elements; see `slipstream.step.leaves`."""

    def batch_fields(self: Any) -> dict[str, Any]:
        # Omit a property such as `name`, because its value is stored in the `_name` field.
        return {name: self.__dict__[name] for name in sorted(self._data_fields) if name in self.__dict__}

    module.BaseDataElement._batch_fields = batch_fields


def patch_model_utils(module: ModuleType) -> None:
    """Convert to and from Slipstream's `SyncBatchNorm`, which runs on every device."""

    def convert(module: nn.Module, implementation: str = "torch") -> nn.Module:
        return convert_sync_batchnorm(module)

    module.convert_sync_batchnorm = convert  # type: ignore[attr-defined]
    module.revert_sync_batchnorm = revert_sync_batchnorm  # type: ignore[attr-defined]
