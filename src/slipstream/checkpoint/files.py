"""Read and write checkpoint files.

Files are written atomically, contain only tensors and built-in Python values, and are read with `weights_only=True`.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.dist.sharding import is_sharded
from slipstream.errors import CheckpointError, did_you_mean
from slipstream.files import replacing

__all__ = [
    "find_latest_checkpoint",
    "mark_last_checkpoint",
    "plain",
    "read_file",
    "remove_checkpoint",
    "save_checkpoint",
    "write_text",
]

LAST = "last_checkpoint"


def save_checkpoint(checkpoint: Mapping[str, Any], path: str | Path, warn: Callable[[str], None]) -> None:
    """Write `checkpoint` to `path` atomically: a crash leaves either the old file or the complete new one.

    Values that are neither tensors nor built-in Python values are omitted, and `warn` is called, because `torch.load`
    cannot read them with `weights_only=True`.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = plain(checkpoint, warn)
    with replacing(path) as temporary:
        torch.save(content, temporary)


def write_text(path: Path, text: str) -> None:
    """Write a small text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text)


def read_file(path: Path, map_location: str | torch.device = "cpu") -> dict[str, Any]:
    """Read a checkpoint file without executing code from it.

    Raises:
        CheckpointError: the file does not exist, is damaged, or contains pickled objects.
    """
    if not path.is_file():
        known = (p for pattern in ("*.pth", "*.sharded") for p in path.parent.glob(pattern))
        siblings = [p.name for p in known] if path.parent.is_dir() else []
        raise CheckpointError(f"the checkpoint {path} does not exist{did_you_mean(path.name, siblings)}")
    if not _is_torch_file(path):
        raise CheckpointError(f"{path} is not a checkpoint: it was not written by torch.save")
    try:
        checkpoint = torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} contains pickled objects or is damaged. Pickled objects are never loaded, because they can "
            "execute code. If you trust the file, convert it: load it with c = torch.load(path, weights_only=False), "
            "remove all values other than tensors and built-in Python values (such as MMEngine's 'message_hub'), "
            "and call torch.save(c, path)"
        ) from error
    except Exception as error:  # a damaged file can raise any exception
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(checkpoint, Mapping):
        raise CheckpointError(f"{path} must contain a dict of tensors, not a {type(checkpoint).__name__}")
    return dict(checkpoint)


def _is_torch_file(path: Path) -> bool:
    """Return whether the file starts like a file written by `torch.save`: a zip archive, or a pickle (old format)."""
    with path.open("rb") as file:
        return file.read(1) in (b"P", b"\x80")


def mark_last_checkpoint(folder: str | Path, path: Path) -> None:
    """Make `path` the checkpoint that `find_latest_checkpoint(folder)` returns."""
    write_text(Path(folder) / LAST, str(path.absolute()))


def remove_checkpoint(folder: Path, name: str) -> None:
    """Remove the checkpoint `name` (a file, or the folder of a sharded checkpoint) from `folder`, if it exists.

    `name` may come from an untrusted checkpoint. Therefore, this function only removes paths inside `folder`, and only
    folders with the suffix `.sharded`.
    """
    path = Path(os.path.normpath(folder / name))
    if not path.is_relative_to(os.path.normpath(folder)):
        return
    if path.is_dir() and path.suffix == ".sharded":
        shutil.rmtree(path)
    elif path.is_file():
        path.unlink()


def find_latest_checkpoint(folder: str | Path) -> Path | None:
    """Return the checkpoint named by `last_checkpoint` in `folder`, or None if there is none.

    Raises:
        CheckpointError: the checkpoint named by `last_checkpoint` does not exist.
    """
    pointer = Path(folder) / LAST
    if not pointer.is_file():
        return None
    latest = Path(pointer.read_text().strip())
    # The second candidate supports a work_dir that was moved.
    for candidate in (latest, Path(folder) / latest.name):
        if candidate.exists():
            return candidate
    raise CheckpointError(
        f"{pointer} refers to {latest}, which does not exist; pass the path of a checkpoint instead"
    )


def plain(
    value: Any,
    warn: Callable[[str], None],
    where: str = "checkpoint",
    copies: dict[Any, Tensor] | None = None,
) -> Any:
    """Copy `value`; convert NumPy values to numbers and tensors; omit values of other types.

    Tensors that are not sharded are moved to the CPU, so that a machine without this device can load them. Equal views
    of one storage (tied weights) remain equal views: `copies` contains those that were moved before.
    """
    if isinstance(value, torch.nn.Parameter):
        value = value.detach()
    copies = {} if copies is None else copies
    if isinstance(value, Tensor):
        return value if is_sharded(value) else _on_cpu(value, copies)
    if value is None or type(value) in _PLAIN:
        return value
    # Instances of subclasses (NumPy's float64, IntEnum) would be pickled with their class.
    for kind in _BASES:
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, str):
        return str.__str__(value)
    number = isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biuf" and value.itemsize <= 8
    if number and isinstance(value, np.generic):
        return value.item()
    if number:
        return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("=")))
    if isinstance(value, Mapping):
        items = ((plain(k, warn, where), plain(v, warn, f"{where}.{k}", copies)) for k, v in value.items())
        return {k: v for k, v in items if k is not _OMITTED and v is not _OMITTED}
    if isinstance(value, list | tuple | set | frozenset):
        parts = [plain(v, warn, f"{where}[{i}]", copies) for i, v in enumerate(value)]
        kept = [part for part in parts if part is not _OMITTED]
        return tuple(kept) if isinstance(value, tuple) else kept
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, torch.device | torch.dtype):
        return value
    warn(
        f"{where} is not saved: a {type(value).__name__} is neither a tensor nor a built-in Python value (number, "
        "string, list, dict, ...)"
    )
    return _OMITTED


def _on_cpu(tensor: Tensor, copies: dict[Any, Tensor]) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    key = (
        tensor.untyped_storage()._cdata,
        tensor.dtype,
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
    )
    if key not in copies:
        copies[key] = tensor.cpu()
    return copies[key]


_BASES: tuple[Any, ...] = (int, float, complex, bytes)
_PLAIN = (bool, str, *_BASES)
_OMITTED = object()
