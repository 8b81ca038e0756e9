"""Random access to the samples in WebDataset tar shards, through an index that is built once and cached on disk."""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
import re
import tarfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipstream.dataset.sources.base import file_version
from slipstream.errors import ConfigError, DataError, explained
from slipstream.files import atomic_write, user_cache

# Default maximum size in bytes of a file in a shard. Each file is read into memory before it is decoded.
MAX_BYTES = 2**28
_FORMAT = 3
# WebDataset's rule: the key ends at the first dot of the file name, and the rest is the extension.
_NAME = re.compile(r"((?:.*/|)[^./]+)\.([^/]+)", re.DOTALL)
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


def shard_paths(shards: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the files that match one or more patterns, which may contain `*` or ranges such as `{0000..0146}`.

    Raises:
        DataError: no file matches a pattern, or a file in a range does not exist.
    """
    found: list[Path] = []
    for pattern in [shards] if isinstance(shards, str | Path) else shards:
        pieces = _RANGE.split(str(pattern))
        ranges = [
            [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
            for first, last in zip(pieces[1::3], pieces[2::3], strict=True)
        ]
        for numbers in itertools.product(*ranges):
            path = "".join(itertools.chain(*zip(pieces[::3], [*numbers, ""], strict=True)))
            files = sorted(glob.glob(path)) if glob.has_magic(path) else [path]  # noqa: PTH207  (absolute patterns)
            if missing := [file for file in files or [path] if not Path(file).is_file()]:
                raise DataError(f"the shard '{missing[0]}' does not exist; shards must be local files")
            found += map(Path, files)
    if len({path.resolve() for path in found}) < max(len(found), 1):
        raise ConfigError("at least one shard is required, and each shard may be listed only once", "shards")
    return found


class TarShards:
    """The samples of several shards, in order, with the files selected by `fields`.

    Args:
        paths: the shards.
        fields: the file extensions for each field name, separated by semicolons (`"jpg;png"`); the first extension
            found in a sample is used.
        index: cache folder for the sample positions; by default, a folder in the user's cache.
        max_bytes: maximum size of a file.

    Raises:
        DataError: a shard cannot be read, or a sample has no file for a field.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        fields: Mapping[str, str],
        index: str | Path | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.paths, self.max_bytes, self.fields = list(paths), max_bytes, list(fields)
        folder = Path(index) if index else user_cache("tar_shards")
        tables = [_select(_shard_index(path, folder), fields, path) for path in self.paths]
        # Arrays of bytes, because each worker process would get its own copy of a list of strings.
        self._names = np.concatenate([names for names, _ in tables])
        self._parts = np.concatenate([parts for _, parts in tables])
        self._first = np.cumsum([0, *(len(names) for names, _ in tables)])
        self._versions = [_version(path) for path in self.paths]
        if not len(self):
            raise DataError(f"the shards contain no samples: {', '.join(map(str, self.paths[:5]))}")

    def __len__(self) -> int:
        return len(self._parts)

    def path(self, index: int) -> Path:
        """Return the shard of a sample."""
        return self.paths[self._shard(index)]

    def position(self, index: int) -> int:
        """Return the byte offset of a sample's first field in its shard. Several samples may have the same key."""
        return int(self._parts[index, 0, 0])

    def version(self, index: int) -> str:
        """Return the size and the modification time that the sample's shard had when it was opened."""
        return self._versions[self._shard(index)]

    def name(self, index: int, field: str) -> str:
        """Return the shard path and the file name, for use in messages and as the name of a cached sample."""
        return f"{self.path(index)}:{os.fsdecode(self._names[index, self.fields.index(field)])}"

    def extension(self, index: int, field: str) -> str:
        """Return the last part of a file's extension in lowercase."""
        return self.name(index, field).rpartition(".")[2].lower()

    def read(self, index: int, field: str) -> bytes:
        """Return the contents of a file.

        Raises:
            DataError: the shard cannot be read or has changed, or the file is larger than `max_bytes`.
        """
        offset, size = map(int, self._parts[index, self.fields.index(field)])
        name, path = self.name(index, field), self.path(index)
        if size > self.max_bytes:
            raise DataError(f"'{name}' has {size:,} bytes, more than max_bytes={self.max_bytes:,}")
        if _version(path) != self.version(index):
            raise DataError(f"'{path}' has changed since its index was read; restart the run")
        try:
            with path.open("rb") as file:
                file.seek(offset)
                return file.read(size)
        except OSError as error:
            raise DataError(f"cannot read '{name}': {error}") from error

    def _shard(self, index: int) -> int:
        return int(np.searchsorted(self._first, index, side="right")) - 1


def _version(path: Path) -> str:
    return f"{_FORMAT}-{file_version(path)}"


# The name of each file in a shard, and its offset and size, int64 (files, 2).
Index = tuple[NDArray[np.bytes_], NDArray[np.int64]]


def _shard_index(path: Path, folder: Path) -> Index:
    """Return the index of a shard from the cache, or build it and store it. It depends on the shard's version."""
    key = os.fsencode(f"{path.absolute()} {_version(path)}")
    cache_file = folder / f"{hashlib.blake2b(key, digest_size=16).hexdigest()}.npz"
    try:
        with np.load(cache_file, allow_pickle=False) as file:
            names, parts = file["names"], file["parts"]
        if names.dtype.kind == "S" and parts.dtype == np.int64 and parts.shape == (len(names), 2):
            return names, parts
    except Exception:  # NumPy and zipfile raise many types of errors for a missing or damaged file
        pass
    names, parts = _read_headers(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(cache_file) as temporary, temporary.open("wb") as target:
            np.savez(target, names=names, parts=parts)
    except OSError as error:
        warnings.warn(f"cannot store the index of '{path}': {error}; set `index`", stacklevel=4)
    return names, parts


def _read_headers(path: Path) -> Index:
    """Read the headers of an uncompressed tar file.

    Raises:
        DataError: the archive is compressed, damaged or incomplete, or contains something other than regular files.
    """
    files, size = [], path.stat().st_size
    remedy = "shards must be uncompressed tar files"
    with explained(DataError, lambda why: f"cannot read '{path}': {why}; {remedy}"):
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                if not (member.isdir() or (member.isreg() and not member.issparse())):
                    raise DataError(f"'{member.name}' in '{path}' is a link or a special file")
                if member.isreg():
                    files.append((os.fsencode(member.name), member.offset_data, member.size))
                tar.members = []  # type: ignore[attr-defined]
            end = tar.offset
        with path.open("rb") as file:
            file.seek(end)
            # `tarfile` stops at a damaged header, and does not check that the archive is complete.
            complete = end < size and not any(any(block) for block in iter(lambda: file.read(2**20), b""))
    if not complete:
        raise DataError(f"'{path}' is damaged or incomplete after byte {end:,}; copy the file again")
    parts = np.array([position for _, *position in files], np.int64).reshape(-1, 2)
    return np.array([name for name, *_ in files], np.bytes_), parts


def _select(index: Index, fields: Mapping[str, str], path: Path) -> Index:
    """Return the names and the positions of each sample's files: (samples, fields) and (samples, fields, 2)."""
    samples: list[dict[str, int]] = []
    key: str | None = None
    for row, encoded in enumerate(index[0].tolist()):
        match = _NAME.fullmatch(os.fsdecode(encoded))
        if match is None:
            continue  # WebDataset also ignores files without an extension, and hidden files
        if key != match[1]:
            samples.append({})
            key = match[1]
        if match[2].lower() in samples[-1]:
            raise DataError(f"the sample {key!r} in '{path}' has two files with the extension {match[2]!r}")
        samples[-1][match[2].lower()] = row
    words = [[word.strip().lower().removeprefix(".") for word in text.split(";")] for text in fields.values()]
    found = [[next((sample[w] for w in each if w in sample), -1) for each in words] for sample in samples]
    rows = np.array(found, np.int64).reshape(len(samples), len(fields))
    for number, column in np.argwhere(rows < 0)[:1]:
        field, has = list(fields.items())[column], ", ".join(samples[number])
        raise DataError(f"sample {number} in '{path}' has no file for '{field[0]}' ({field[1]}), only {has}")
    return index[0][rows], index[1][rows]
