"""Checkpoint files: written atomically, tensors and plain values only, read with `weights_only=True`."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from slipstream.errors import CheckpointError, did_you_mean
from slipstream.files import replacing

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "find_latest_checkpoint",
    "load_checkpoint",
    "mark_last_checkpoint",
    "plain",
    "remove_checkpoint",
    "save_checkpoint",
    "write_text",
]

LAST = "last_checkpoint"


def save_checkpoint(checkpoint: Mapping[str, Any], path: str | Path, warn: Callable[[str], None]) -> None:
    """Write `checkpoint` to `path` so that a crash leaves either the old file or the whole new one.

    Values that are neither tensors nor plain are left out, and `warn` is told which: `torch.load` with
    `weights_only=True` could not read them.
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


def load_checkpoint(
    path: str | Path, map_location: str | torch.device = "cpu", mesh: DeviceMesh | None = None
) -> dict[str, Any]:
    """Read a checkpoint, a file or the folder of a sharded one; nothing in it is executed.

    Args:
        path: where it is.
        map_location: the device of its tensors.
        mesh: a sharded one's tensors come sharded over it, instead of whole.

    Raises:
        CheckpointError: there is none, it is damaged, or it holds pickled objects.
    """
    path = Path(path)
    if path.is_dir():
        from slipstream.checkpoint.sharded import load_sharded

        return load_sharded(path, map_location, mesh)
    if not path.is_file():
        known = (p for pattern in ("*.pth", "*.sharded") for p in path.parent.glob(pattern))
        siblings = [p.name for p in known] if path.parent.is_dir() else []
        raise CheckpointError(f"there is no checkpoint {path}{did_you_mean(path.name, siblings)}")
    if not _is_torchs(path):
        raise CheckpointError(f"{path} is no checkpoint: torch.save did not write it")
    try:
        checkpoint = torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds pickled objects (or is damaged), which are never loaded, since they can run code. "
            "If you trust it, convert it once: c = torch.load(path, weights_only=False), drop the keys that "
            "are no tensors or plain values (MMEngine's 'message_hub'), and torch.save(c, path)"
        ) from error
    except Exception as error:  # damaged bytes can raise nearly anything
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(checkpoint, Mapping):
        raise CheckpointError(f"{path} holds a {type(checkpoint).__name__}, not a dict of tensors")
    return dict(checkpoint)


def _is_torchs(path: Path) -> bool:
    """Say whether the file begins as those of `torch.save` do: a zip archive, or a pickle of the old format."""
    with path.open("rb") as file:
        return file.read(1) in (b"P", b"\x80")


def mark_last_checkpoint(folder: str | Path, path: Path) -> None:
    """Make `path` the checkpoint that `find_latest_checkpoint(folder)` returns."""
    write_text(Path(folder) / LAST, str(path.absolute()))


def remove_checkpoint(folder: Path, name: str) -> None:
    """Remove the checkpoint `name` from `folder`, a file or the folder of a sharded one, if it is there.

    Names are handed on in checkpoints, which may be anybody's: nothing outside of `folder` is touched, and no
    folder that is no checkpoint.
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
        CheckpointError: the file that `last_checkpoint` names is gone.
    """
    pointer = Path(folder) / LAST
    if not pointer.is_file():
        return None
    latest = Path(pointer.read_text().strip())
    # A work_dir that was moved still finds its own files.
    for candidate in (latest, Path(folder) / latest.name):
        if candidate.exists():
            return candidate
    raise CheckpointError(
        f"{pointer} names {latest}, which does not exist; pass the checkpoint's path instead"
    )


def plain(value: Any, warn: Callable[[str], None], where: str = "checkpoint") -> Any:
    """Return `value` with containers copied, numpy turned into plain numbers and tensors, and the rest left out."""
    if isinstance(value, torch.nn.Parameter):
        return value.detach()
    if value is None or type(value) in _PLAIN or isinstance(value, torch.Tensor):
        return value
    # Subclasses (NumPy's float64 is one of float, an IntEnum one of int) would be pickled as what they are.
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
        items = ((plain(k, warn, where), plain(v, warn, f"{where}.{k}")) for k, v in value.items())
        return {k: v for k, v in items if k is not _LEFT_OUT and v is not _LEFT_OUT}
    if isinstance(value, list | tuple | set | frozenset):
        parts = [plain(v, warn, f"{where}[{i}]") for i, v in enumerate(value)]
        kept = [part for part in parts if part is not _LEFT_OUT]
        return tuple(kept) if isinstance(value, tuple) else kept
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, torch.device | torch.dtype):
        return value
    warn(f"{where} is a {type(value).__name__}, neither tensor nor plain value: it is not saved")
    return _LEFT_OUT


_BASES: tuple[Any, ...] = (int, float, complex, bytes)
_PLAIN = (bool, str, *_BASES)
_LEFT_OUT = object()
