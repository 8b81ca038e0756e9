"""Read and write checkpoint files.

Files are written atomically, contain only tensors and built-in Python values, and are read with `weights_only=True`
after their checksums have been verified.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any
from zipfile import ZipFile, ZipInfo

import torch

from slipstream.checkpoint.mmengine_files import convert_checkpoint, is_from_mmengine, safe_globals
from slipstream.checkpoint.safetensors_files import (
    INDEX,
    SUFFIX,
    is_safetensors,
    read_safetensors,
    save_safetensors,
)
from slipstream.checkpoint.weights import weights_in
from slipstream.cores import cores
from slipstream.errors import CheckpointError, did_you_mean
from slipstream.files import atomic_write, check_space
from slipstream.plain_values import plain

# Name of the file that contains everything except the shards, in the folder of a sharded checkpoint.
PLAIN_FILE = "plain.pth"
_CHUNK = 2**22


def save_checkpoint(checkpoint: Mapping[str, Any], path: str | Path, warn: Callable[[str], None]) -> None:
    """Write `checkpoint` to `path` atomically: a crash leaves either the old file or the complete new one.

    Values that are neither tensors nor built-in Python values are omitted, because `torch.load` cannot read them with
    `weights_only=True`. `warn` is called for each of these values. A file whose name ends with `.safetensors` contains
    only the weights.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = plain(checkpoint, warn)
    if path.suffix == SUFFIX:
        save_safetensors(weights_in(content, path), path)
        return
    with atomic_write(path) as temporary:
        try:
            torch.save(content, temporary)
        except RuntimeError:  # torch's writer does not report why it fails
            check_space(temporary)
            raise


def read_file(path: Path, map_location: str | torch.device = "cpu") -> dict[str, Any]:
    """Read a checkpoint file, or the weights in safetensors files, without executing code from it.

    With `map_location="meta"`, the tensor data is neither read nor verified.

    Raises:
        CheckpointError: the file does not exist, is damaged, or contains pickled objects.
    """
    if not path.is_file():
        candidates = (
            p for pattern in ("*.pth", "*.sharded", "*.safetensors*") for p in path.parent.glob(pattern)
        )
        siblings = [p.name for p in candidates] if path.parent.is_dir() else []
        raise CheckpointError(f"the checkpoint {path} does not exist{did_you_mean(path.name, siblings)}")
    with path.open("rb") as file:
        if path.name.endswith(SUFFIX + INDEX) or is_safetensors(file):
            return read_safetensors(path, map_location)
        if file.read(1) not in (b"P", b"\x80"):  # a zip archive, or a pickle (the old format of `torch.save`)
            raise CheckpointError(
                f"{path} is not a checkpoint: it was not written by torch.save; pass a different file"
            )
        if str(map_location) != "meta":
            verify(file, path)
    try:
        with torch.serialization.safe_globals(safe_globals()):
            checkpoint = torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} contains pickled objects or is damaged. Pickled objects are never loaded, because they can "
            "execute code. If you trust the file, convert it: load it with c = torch.load(path, weights_only=False), "
            "remove all values that are neither tensors nor built-in Python values (such as objects in "
            "'message_hub'), and call torch.save(c, path)"
        ) from error
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file can raise any exception
        raise CheckpointError(
            f"{path} cannot be read: {error}. If the file is damaged, use another checkpoint"
        ) from error
    if not isinstance(checkpoint, Mapping):
        raise CheckpointError(f"{path} must contain a dict, not a {type(checkpoint).__name__}")
    return convert_checkpoint(dict(checkpoint)) if is_from_mmengine(checkpoint) else dict(checkpoint)


def verify(file: IO[bytes], name: Path) -> None:
    """Verify each entry of a file written by `torch.save` against its CRC-32, which `torch.load` does not verify.

    Safetensors files, pickles (written by torch before 1.6), and files written after
    `torch.serialization.set_crc32_options(False)` have no checksums and are not verified.

    Raises:
        CheckpointError: the file is damaged.
    """
    file.seek(0)
    if is_safetensors(file) or file.read(1) == b"\x80":
        return
    try:
        with ZipFile(file) as archive, ThreadPoolExecutor(min(cores(), 8)) as pool:

            def read(entry: ZipInfo) -> None:
                with archive.open(entry) as stream:  # raises an error if the checksum differs
                    while stream.read(_CHUNK):
                        pass

            entries = archive.infolist()
            if any(entry.CRC for entry in entries):
                deque(pool.map(read, entries), maxlen=0)
    except Exception as error:  # a damaged archive can raise any exception
        raise CheckpointError(f"{name} is damaged: {error}; use another checkpoint") from error


def remove_checkpoint(folder: Path, name: str) -> None:
    """Remove the checkpoint `name` (a file, or the folder of a sharded checkpoint) from `folder`, if it exists.

    `name` may come from an untrusted checkpoint. Therefore, this function removes only paths inside `folder`, and
    a folder only if its name ends with `.sharded`. A symlink is removed, but not its target.
    """
    path = Path(os.path.normpath(folder / name))
    if not path.parent.resolve().is_relative_to(folder.resolve()):
        return
    if path.is_dir() and not path.is_symlink():
        if path.suffix == ".sharded":
            shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def replaced_name(folder: Path) -> Path:
    """Return the path to which a sharded checkpoint is moved while a new one replaces it."""
    return folder.with_name(f".{folder.name}.old")


def stored_config(meta: Any) -> dict[str, Any]:
    """Return the configuration in a checkpoint's `meta` entry as plain data, or an empty dict if it cannot be read.

    This function does not follow `_base_`, import modules or read environment variables. Otherwise, an untrusted
    checkpoint could insert the values of environment variables into a file name or a URL.
    """
    import yaml  # imported here, because a Runner without configuration files does not need it

    from slipstream.config.yaml_format import Loader

    try:
        cfg = yaml.load(meta["cfg"], Loader)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError, yaml.YAMLError):
        return {}  # the configuration is missing or contains Python objects
    return cfg if isinstance(cfg, dict) else {}
