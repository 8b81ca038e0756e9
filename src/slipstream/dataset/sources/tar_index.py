"""Index of the samples in WebDataset tar shards, built once and cached on disk."""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipstream.dataset.sources.tar_headers import tar_members
from slipstream.errors import DataError
from slipstream.files import atomic_write, user_cache

__all__ = ["ShardIndex", "shard_index"]

_FORMAT = 2
# WebDataset's rule: the key ends at the first dot of the file name, and the rest is the extension.
_NAME = re.compile(r"((?:.*/|)[^./]+)\.([^/]+)", re.DOTALL)
_DTYPES = {"parts": np.int64, "extensions": np.uint8, "keys": np.uint8}


@dataclass(frozen=True)
class ShardIndex:
    """The samples of a shard. A sample consists of consecutive files with the same key.

    Attributes:
        keys: key of each sample, which is the path of its files up to the first dot in the file name.
        extensions: the distinct extensions in this shard, in lowercase.
        parts: int64 (files, 4): for each file, the sample index, the index in `extensions`, the offset and the size.
        version: the shard's size in bytes and modification time in nanoseconds.
    """

    keys: list[str]
    extensions: list[str]
    parts: NDArray[np.int64]
    version: tuple[int, int]

    def sample_extensions(self, sample: int) -> list[str]:
        """Return the extensions of a sample."""
        return [self.extensions[i] for i in self.parts[self.parts[:, 0] == sample, 1]]


def shard_index(path: Path, folder: str | Path | None = None) -> ShardIndex:
    """Return the index of a shard from the cache, or build the index from the shard headers and cache it.

    The index is rebuilt if the size or the modification time of the shard changes. If the index cannot be written to
    the cache, this function issues a warning and still returns the index.

    Args:
        path: the tar file.
        folder: cache folder; by default, a folder in the user's cache.

    Raises:
        DataError: the shard cannot be read (see `tar_members`), or a sample has two files with the same extension.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(
            f"cannot read '{path}': {error.strerror}; check the file and its permissions"
        ) from error
    version = np.array([_FORMAT, status.st_size, status.st_mtime_ns])
    name = hashlib.blake2b(os.fsencode(path.absolute()), digest_size=16).hexdigest()
    cache_file = (Path(folder) if folder else user_cache("tar_shards")) / f"{name}.npz"
    index = _read(cache_file, version)
    if index is None:
        index = _build(path, (status.st_size, status.st_mtime_ns))
        _store(cache_file, index, version)
    return index


def _build(path: Path, version: tuple[int, int]) -> ShardIndex:
    keys: list[str] = []
    extensions: dict[str, int] = {}
    parts: list[tuple[int, int, int, int]] = []
    seen: set[int] = set()
    for member in tar_members(path):
        match = _NAME.fullmatch(member.name)
        if match is None:
            continue  # WebDataset also ignores files without an extension, and hidden files
        if not keys or keys[-1] != match[1]:
            keys.append(match[1])
            seen.clear()
        kind = extensions.setdefault(match[2].lower(), len(extensions))
        if kind in seen:
            raise DataError(
                f"the sample {match[1]!r} in '{path}' has two files with the extension {match[2]!r}; "
                "recreate the shard with different extensions"
            )
        seen.add(kind)
        parts.append((len(keys) - 1, kind, member.offset, member.size))
    return ShardIndex(keys, list(extensions), np.array(parts, np.int64).reshape(-1, 4), version)


def _store(path: Path, index: ShardIndex, version: NDArray[np.int64]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary, temporary.open("wb") as file:
            np.savez(
                file,
                version=version,
                parts=index.parts,
                extensions=_pack(index.extensions),
                keys=_pack(index.keys),
            )
    except OSError as error:
        warnings.warn(
            f"cannot write to the cache '{path.parent}' ({error.strerror or error}); the shard headers will be "
            "read again at each start. Free disk space, or set `index` to another folder",
            stacklevel=4,
        )


def _read(path: Path, version: NDArray[np.int64]) -> ShardIndex | None:
    """Return the cached index, or None if it is missing or damaged, or belongs to another version of the shard."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if not np.array_equal(file["version"], version):
                return None
            parts, extensions, keys = (file[name] for name in _DTYPES)
    except FileNotFoundError:
        return None
    except Exception:  # NumPy and zipfile raise many types of errors for a damaged file
        return None
    if any(
        array.dtype != dtype for array, dtype in zip((parts, extensions, keys), _DTYPES.values(), strict=True)
    ):
        return None
    size, time = int(version[1]), int(version[2])
    index = ShardIndex(_unpack(keys), _unpack(extensions), parts, (size, time))
    return index if _is_consistent(index, size) else None


def _is_consistent(index: ShardIndex, size: int) -> bool:
    """Return whether all sample numbers, extension numbers, offsets and sizes are valid for a shard of `size` bytes."""
    parts = index.parts
    if parts.ndim != 2 or parts.shape[1] != 4:
        return False
    limits = np.array([len(index.keys), len(index.extensions), size + 1, size + 1])
    return bool((parts >= 0).all() and (parts < limits).all() and (parts[:, 2:].sum(1) <= size).all())


def _pack(words: Sequence[str]) -> NDArray[np.uint8]:
    """Encode the words as bytes, each followed by a zero byte, which file names cannot contain."""
    return np.frombuffer(b"".join(os.fsencode(word) + b"\0" for word in words), np.uint8)


def _unpack(data: NDArray[np.uint8]) -> list[str]:
    return [os.fsdecode(word) for word in data.tobytes().split(b"\0")[:-1]]
