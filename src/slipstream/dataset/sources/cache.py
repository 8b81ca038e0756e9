"""Disk cache of decoded samples, read through memory maps."""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import DataError
from slipstream.files import atomic_write

Key: TypeAlias = tuple[str, str]
Pair: TypeAlias = tuple[NDArray[np.uint8], NDArray[np.uint8]]

_MAGIC = b"SLIPDEC\0"
_FORMAT_VERSION = 1
_FIELDS = struct.Struct("<8sIII16sI")  # magic, format version, fields of _Header; their CRC-32 follows
_PAGE = 4096  # image and mask start at page boundaries
_SUFFIX = ".decoded"


class DecodeCache:
    """Disk cache of decoded images and masks, with one file per sample. Processes that use the same folder share it.

    A file is written under a temporary name and then renamed, so several processes can fill the cache at the same
    time and never read a partial file. A file contains the version of its sample and is rewritten when the version
    changes. The header is checked each time a file is opened. The pixel checksum is checked only the first time that a
    process opens the file.

    The size of a file is 4 bytes per pixel plus up to 8 KiB. Do not run `prune` while another machine is training from
    the same network folder, because that machine's memory maps of the removed files become invalid.

    Args:
        folder: folder that contains the cache files; it is created on the first write.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self._verified: set[bytes] = set()
        self._writable = True

    def get(self, key: Key, load: Callable[[], Pair]) -> Pair:
        """Return the sample with this key from the cache. If it is missing, call `load` and store the result.

        If the folder is not writable (read-only or full), this method warns once and stops storing samples.

        Args:
            key: name and version of the sample.
            load: function that returns the image, uint8 (H, W, 3), and the mask, uint8 (H, W).

        Raises:
            DataError: the arrays returned by `load` have the wrong dtypes or shapes.
        """
        pair = self.read(key)
        if pair is None:
            pair = load()
            try:
                if self._writable:
                    self.write(key, *pair)
            except OSError as error:
                self._writable = False
                warnings.warn(
                    f"cannot write to the cache '{self.folder}' ({error.strerror or error}); samples that are not "
                    "cached are decoded in every epoch. Free disk space or use a different folder",
                    stacklevel=2,
                )
        return pair

    def read(self, key: Key) -> Pair | None:
        """Return the sample as read-only views of the memory-mapped file.

        The result is None if the file cannot be opened, has a different version or is damaged. A damaged file causes a
        warning.
        """
        path, digest = self.path(key[0]), _digest(key)
        data: mmap.mmap | bytes
        try:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError:
            return None  # missing or not readable
        except ValueError:  # an empty file cannot be mapped
            data = b""
        header = _Header.unpack(data[: _FIELDS.size + 4])
        if header is not None and header.digest != digest:
            return None
        if header is not None and len(data) == header.file_size:
            if digest not in self._verified:
                with memoryview(data) as view, view[_PAGE:] as pixels:
                    if zlib.crc32(pixels) == header.checksum:
                        self._verified.add(digest)
            if digest in self._verified:
                return header.views(data)
        warnings.warn(f"'{path}' is damaged; the sample will be decoded again", stacklevel=2)
        return None

    def write(self, key: Key, image: NDArray[np.uint8], mask: NDArray[np.uint8]) -> None:
        """Store a sample, which consists of an image, uint8 (H, W, 3), and a mask, uint8 (H, W).

        Raises:
            OSError: the folder is not writable.
            DataError: the arrays have the wrong dtypes or shapes.
        """
        if not image.dtype == mask.dtype == np.uint8 or mask.ndim != 2 or image.shape != (*mask.shape, 3):
            raise DataError(
                f"load() must return uint8 arrays (H, W, 3) and (H, W) for '{key[0]}', not {image.dtype} {image.shape} "
                f"and {mask.dtype} {mask.shape}"
            )
        pieces = [image.tobytes(), b"", mask.tobytes()]
        pieces[1] = bytes(-len(pieces[0]) % _PAGE)
        header = _Header(mask.shape[0], mask.shape[1], _digest(key), zlib.crc32(b"".join(pieces)))
        path = self.path(key[0])
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary, temporary.open("wb") as file:
            file.write(header.pack())
            file.writelines(pieces)

    def path(self, name: str) -> Path:
        """Return the path of the file for a sample with this name (the first part of its key)."""
        digest = hashlib.blake2b(os.fsencode(name), digest_size=16).hexdigest()
        return self.folder / digest[:2] / f"{digest[2:]}{_SUFFIX}"

    @staticmethod
    def file_size(shape: tuple[int, int]) -> int:
        """Return the size in bytes of the file for a sample with this (height, width)."""
        return _Header(*shape, b"", 0).file_size


class _Header(NamedTuple):
    height: int
    width: int
    digest: bytes
    checksum: int

    @classmethod
    def unpack(cls, data: bytes) -> _Header | None:
        """Return the header, or None if it is damaged. A header with a different format version matches no sample."""
        if len(data) < _FIELDS.size + 4:
            return None
        magic, version, *fields = _FIELDS.unpack_from(data)
        if magic == _MAGIC and version != _FORMAT_VERSION:
            return cls(0, 0, b"", 0)
        is_intact = zlib.crc32(data[: _FIELDS.size]) == int.from_bytes(data[_FIELDS.size :], "little")
        return cls(*fields) if magic == _MAGIC and is_intact else None

    def pack(self) -> bytes:
        fields = _FIELDS.pack(_MAGIC, _FORMAT_VERSION, *self)
        return (fields + zlib.crc32(fields).to_bytes(4, "little")).ljust(_PAGE, b"\0")

    @property
    def mask_start(self) -> int:
        image_end = _PAGE + 3 * self.height * self.width
        return image_end + -image_end % _PAGE

    @property
    def file_size(self) -> int:
        return self.mask_start + self.height * self.width

    def views(self, data: mmap.mmap | bytes) -> Pair:
        shape, pixels = (self.height, self.width), self.height * self.width
        image = np.frombuffer(data, np.uint8, 3 * pixels, _PAGE).reshape(*shape, 3)
        return image, np.frombuffer(data, np.uint8, pixels, self.mask_start).reshape(shape)


def _digest(key: Key) -> bytes:
    return hashlib.blake2b(b"\0".join(map(os.fsencode, key)), digest_size=16).digest()
