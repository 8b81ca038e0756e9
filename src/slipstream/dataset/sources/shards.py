"""Random access to the samples in WebDataset tar shards."""

from __future__ import annotations

import glob
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.dataset.sources.decode import ImageBytes, read_image
from slipstream.dataset.sources.tar_index import ShardIndex, shard_index
from slipstream.errors import ConfigError, DataError

__all__ = ["MAX_BYTES", "TarShards", "decode_field", "shard_paths"]

MAX_BYTES = 2**28
"""Default maximum size in bytes of a file in a shard. Each file is read into memory before it is decoded."""
_IMAGES = ("bmp", "jpeg", "jpg", "pgm", "png", "ppm", "tif", "tiff", "webp")
_PICKLES = ("pickle", "pkl", "pt", "pth", "pyd")
_URL = re.compile(r"[a-z0-9]+:", re.IGNORECASE)
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MAX_LISTED_PATHS = 5


def shard_paths(shards: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the files that match one or more patterns, which may contain `*` or ranges such as `{0000..0146}`.

    Raises:
        DataError: no file matches a pattern, or a file in a range does not exist.
        ConfigError: a pattern is a URL, no shard is given, or a shard is listed twice.
    """
    found: list[Path] = []
    for pattern in [shards] if isinstance(shards, str | Path) else shards:
        if _URL.match(str(pattern)) and not Path(pattern).drive:
            raise ConfigError(
                f"'{pattern}' is not a local file; download the shards, or mount the storage", "shards"
            )
        for path in _expand_ranges(str(pattern)):
            files = sorted(glob.glob(path)) if glob.has_magic(path) else [path]  # noqa: PTH207  (absolute patterns)
            if missing := [file for file in files if not Path(file).is_file()]:
                raise DataError(
                    f"the shard '{missing[0]}' does not exist; check the path, or the range in it"
                )
            if not files:
                raise DataError(f"no file matches '{path}'; check the path")
            found += map(Path, files)
    if not found:
        raise ConfigError("at least one shard is required", "shards")
    resolved = [path.resolve() for path in found]
    if len(set(resolved)) < len(resolved):
        duplicate = next(path for path in resolved if resolved.count(path) > 1)
        raise ConfigError(f"the shard '{duplicate}' is listed twice; list each shard once", "shards")
    return found


def _expand_ranges(pattern: str) -> list[str]:
    """Expand the ranges in a pattern. Numbers are padded with zeros to the width of the first number."""
    pieces = _RANGE.split(pattern)
    ranges = [
        [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
        for first, last in zip(pieces[1::3], pieces[2::3], strict=True)
    ]
    return [
        "".join(itertools.chain.from_iterable(zip(pieces[::3], [*numbers, ""], strict=True)))
        for numbers in itertools.product(*ranges)
    ]


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
        ConfigError: `fields` is empty or malformed, or contains an extension of pickled files.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        fields: Mapping[str, str],
        index: str | Path | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.paths, self.max_bytes = list(paths), max_bytes
        self.fields = {name: _alternatives(name, text) for name, text in fields.items()}
        if not self.fields:
            raise ConfigError("at least one field is required", "fields")
        shards = [shard_index(path, index) for path in self.paths]
        # Keys are stored as bytes, because each worker process would get its own copy of a list of strings.
        keys = [os.fsencode(key) for shard in shards for key in shard.keys]
        self._keys, self._ends = b"".join(keys), np.cumsum([0, *map(len, keys)])
        self._versions = [shard.version for shard in shards]
        self._first = np.cumsum([0, *(len(shard.keys) for shard in shards)])
        self._extensions = sorted({word for shard in shards for word in shard.extensions})
        # int64 (samples, fields, 3): index of the extension, offset and size.
        self._parts = np.concatenate(
            [self._locate_files(shard, path) for shard, path in zip(shards, self.paths, strict=True)]
        )
        if not len(self):
            raise DataError(
                f"the shards contain no samples: {', '.join(map(str, self.paths[:_MAX_LISTED_PATHS]))}; check the paths"
            )

    def __len__(self) -> int:
        return len(self._parts)

    def key(self, index: int) -> str:
        """Return the key of a sample."""
        return os.fsdecode(self._keys[self._ends[index] : self._ends[index + 1]])

    def path(self, index: int) -> Path:
        """Return the shard of a sample."""
        return self.paths[self._shard(index)]

    def position(self, index: int) -> int:
        """Return the byte offset of a sample in its shard."""
        return int(self._parts[index, 0, 1])

    def version(self, index: int) -> tuple[int, int]:
        """Return the size and the modification time that the sample's shard had when it was indexed."""
        return self._versions[self._shard(index)]

    def name(self, index: int, field: str) -> str:
        """Return the shard path and the file name, for use in messages."""
        return f"{self.path(index)}:{self.key(index)}.{self.extension(index, field)}"

    def extension(self, index: int, field: str) -> str:
        """Return a file's extension in lowercase."""
        return self._extensions[int(self._parts[index, self._column(field), 0])]

    def read(self, index: int, field: str) -> bytes:
        """Return the contents of a file.

        Raises:
            DataError: the shard cannot be read or has changed, or the file is larger than `max_bytes`.
        """
        _, offset, size = map(int, self._parts[index, self._column(field)])
        if size > self.max_bytes:
            raise DataError(
                f"'{self.name(index, field)}' has {size:,} bytes, more than max_bytes={self.max_bytes:,}; "
                "increase max_bytes if you trust the file"
            )
        try:
            with self.path(index).open("rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                if (status.st_size, status.st_mtime_ns) != self._versions[self._shard(index)]:
                    raise DataError(
                        f"'{self.path(index)}' has changed since its index was read; restart the run, and do not "
                        "change shards during a run"
                    )
                file.seek(offset)
                data = file.read(size)
                while len(data) < size and (more := file.read(size - len(data))):
                    data += more
        except OSError as error:
            raise DataError(
                f"cannot read '{self.path(index)}': {error.strerror or error}; "
                "check the file and its permissions"
            ) from error
        if len(data) < size:
            raise DataError(f"'{self.path(index)}' was truncated while it was being read; restart the run")
        return data

    def _shard(self, index: int) -> int:
        return int(np.searchsorted(self._first, index, side="right")) - 1

    def _column(self, field: str) -> int:
        return list(self.fields).index(field)

    def _locate_files(self, shard: ShardIndex, path: Path) -> NDArray[np.int64]:
        """Return the extension index, offset and size of each selected file in a shard, int64 (samples, fields, 3)."""
        found = np.full((len(shard.keys), len(self.fields), 3), -1, np.int64)
        for position, (name, alternatives) in enumerate(self.fields.items()):
            for extension in reversed([word for word in alternatives if word in shard.extensions]):
                rows = shard.parts[shard.parts[:, 1] == shard.extensions.index(extension)]
                found[rows[:, 0], position, 0] = self._extensions.index(extension)
                found[rows[:, 0], position, 1:] = rows[:, 2:]
            missing = np.flatnonzero(found[:, position, 0] < 0)
            if len(missing):
                verb = "has" if len(missing) == 1 else "have"
                raise DataError(
                    f"{len(missing)} of {len(shard.keys)} samples in '{path}' {verb} no file for '{name}' "
                    f"({';'.join(alternatives)}); the first is {shard.keys[missing[0]]!r} with the extensions "
                    f"{', '.join(shard.sample_extensions(int(missing[0])))}; change fields['{name}'], or recreate the "
                    "shard"
                )
        return found


def _alternatives(name: str, text: str) -> tuple[str, ...]:
    words = tuple(word.strip().lower().removeprefix(".") for word in text.split(";"))
    for word in words:
        if not word:
            raise ConfigError(
                f"'{text}' is not a semicolon-separated list of extensions; use, for example, 'jpg;png'",
                f"fields.{name}",
            )
        if word.rpartition(".")[2] in _PICKLES:
            raise ConfigError(
                f"files with the extension '{word}' are pickled, and reading them can run arbitrary code; convert "
                "them, for example to .npy or .json",
                f"fields.{name}",
            )
    return words


def decode_field(name: str, extension: str, data: bytes, max_pixels: int | None) -> Any:
    """Decode a file; the last part of its extension determines the format.

    Images become uint8 (3, H, W) RGB tensors; `cls`, `cls2`, `index` and `inx` become int64 scalar tensors; `npy`
    becomes a tensor; `json` becomes the parsed value; `txt`, `text` and `transcript` become strings; other files
    remain bytes. Pickled data is never loaded.

    Raises:
        DataError: the file cannot be decoded.
    """
    kind = extension.rpartition(".")[2]
    if kind in _IMAGES:
        pixels = read_image(ImageBytes(name, data), max_pixels)
        return torch.from_numpy(np.array(pixels.transpose(2, 0, 1), order="C"))
    decode = _DECODERS.get(kind)
    if decode is None:
        return data
    try:
        return decode(data)
    except (ValueError, RecursionError, OverflowError, TypeError, EOFError, MemoryError) as error:
        raise DataError(f"cannot read '{name}': {error}; replace the file") from error


def _number(data: bytes) -> torch.Tensor:
    return torch.tensor(np.int64(int(data.decode("ascii"))))


def _text(data: bytes) -> str:
    return data.decode("utf-8")


def _array(data: bytes) -> torch.Tensor:
    try:
        array = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except Exception as error:  # NumPy can raise various exceptions for a damaged header
        raise ValueError(str(error)) from error
    return torch.from_numpy(array)


_DECODERS: Mapping[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("cls", "cls2", "index", "inx"), _number),
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    "json": json.loads,
    "npy": _array,
}
