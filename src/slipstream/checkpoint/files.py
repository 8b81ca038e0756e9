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

import torch

from slipstream.checkpoint.integrity import open_verified
from slipstream.checkpoint.mmengine_files import convert_checkpoint, is_from_mmengine, safe_globals
from slipstream.errors import CheckpointError, did_you_mean
from slipstream.files import atomic_write, check_space
from slipstream.plain_values import plain

__all__ = [
    "read_file",
    "remove_checkpoint",
    "replaced_name",
    "save_checkpoint",
]

PLAIN_FILE = "plain.pth"
"""Name of the file that contains everything except the shards, in the folder of a sharded checkpoint."""


def save_checkpoint(checkpoint: Mapping[str, Any], path: str | Path, warn: Callable[[str], None]) -> None:
    """Write `checkpoint` to `path` atomically: a crash leaves either the old file or the complete new one.

    Values that are neither tensors nor built-in Python values are omitted, because `torch.load` cannot read them with
    `weights_only=True`. `warn` is called for each of these values.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = plain(checkpoint, warn)
    with atomic_write(path) as temporary:
        try:
            torch.save(content, temporary)
        except RuntimeError:  # torch's writer does not report why it fails
            check_space(temporary)
            raise


def read_file(path: Path, map_location: str | torch.device = "cpu") -> dict[str, Any]:
    """Read a checkpoint file without executing code from it.

    With `map_location="meta"`, the tensor data is neither read nor verified.

    Raises:
        CheckpointError: the file does not exist, is damaged, or contains pickled objects.
    """
    if not path.is_file():
        candidates = (p for pattern in ("*.pth", "*.sharded") for p in path.parent.glob(pattern))
        siblings = [p.name for p in candidates] if path.parent.is_dir() else []
        raise CheckpointError(f"the checkpoint {path} does not exist{did_you_mean(path.name, siblings)}")
    if not _is_torch_file(path):
        raise CheckpointError(
            f"{path} is not a checkpoint: it was not written by torch.save; pass a different file"
        )
    try:
        with_data = str(map_location) != "meta"
        with (
            open_verified(path, all_entries=with_data) as file,
            torch.serialization.safe_globals(safe_globals()),
        ):
            checkpoint = torch.load(file, map_location=map_location, weights_only=True)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} contains pickled objects or is damaged. Pickled objects are never loaded, because they can "
            "execute code. If you trust the file, convert it: load it with c = torch.load(path, weights_only=False), "
            "remove all values that are neither tensors nor built-in Python values (such as objects in "
            "'message_hub'), and call torch.save(c, path)"
        ) from error
    except Exception as error:  # a damaged file can raise any exception
        raise CheckpointError(
            f"{path} cannot be read: {error}. If the file is damaged, use another checkpoint"
        ) from error
    if not isinstance(checkpoint, Mapping):
        raise CheckpointError(f"{path} must contain a dict, not a {type(checkpoint).__name__}")
    return convert_checkpoint(dict(checkpoint), path) if is_from_mmengine(checkpoint) else dict(checkpoint)


def _is_torch_file(path: Path) -> bool:
    """Return whether the first byte is that of a zip archive or a pickle (the old format of `torch.save`)."""
    with path.open("rb") as file:
        return file.read(1) in (b"P", b"\x80")


def remove_checkpoint(folder: Path, name: str) -> None:
    """Remove the checkpoint `name` (a file, or the folder of a sharded checkpoint) from `folder`, if it exists.

    `name` may come from an untrusted checkpoint. Therefore, this function removes only paths inside `folder`, and
    a folder only if its name ends with `.sharded`. A symlink is removed, but not its target.
    """
    path = Path(os.path.normpath(folder / name))
    if not path.is_relative_to(os.path.normpath(folder)):
        return
    if not path.parent.resolve().is_relative_to(folder.resolve()):
        return
    if path.is_symlink():
        path.unlink()
    elif path.is_dir() and path.suffix == ".sharded":
        shutil.rmtree(path)
    elif path.is_file():
        path.unlink()


def replaced_name(folder: Path) -> Path:
    """Return the path to which a sharded checkpoint is moved while a new one replaces it."""
    return folder.with_name(f".{folder.name}.old")
