"""Decoded samples on disk: each is decoded once, and whoever asks for it afterwards maps the file."""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import time
import warnings
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import DataError
from slipstream.files import replacing

__all__ = ["DecodeCache"]

Key: TypeAlias = tuple[str, str]
Pair: TypeAlias = tuple[NDArray[np.uint8], NDArray[np.uint8]]

_MAGIC = b"SLIPDEC\0"
_FORMAT = 1
_FIELDS = struct.Struct("<8sIII16sI")  # magic, format, and the fields of _Header; its own CRC-32 follows
_PAGE = 4096  # image and mask each begin on a page of memory of their own
_ENDING = ".decoded"
_ABANDONED = 3600  # seconds after which nobody still writes a temporary file


class DecodeCache:
    """Decoded images and masks, one file a sample, for all processes and machines that name the same folder.

    A file is written whole under another name and renamed, so that any number of processes may fill the
    cache at once: who opens a file finds all of it. It holds the version of the sample it was made from, and
    is made again when the sample has another. Its header is checked at each opening; the pixels against
    their checksum when this process opens the file for the first time.

    A file takes 4 bytes a pixel and up to 12 KiB. `prune` may not run while another machine trains from the
    same network folder: the pages of a removed file are gone for it.

    Args:
        folder: where the files are; made when the first is written.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self._verified: set[bytes] = set()
        self._writable = True

    def get(self, key: Key, load: Callable[[], Pair]) -> Pair:
        """Return the sample `key`, from the cache or else from `load`, which is then kept.

        Where the folder cannot be written (read-only, full), a warning says so once, and training goes on.

        Args:
            key: which sample it is, and which version of it.
            load: returns the image, uint8 (H, W, 3), and the mask, uint8 (H, W).

        Raises:
            DataError: `load` returned something else.
        """
        pair = self.read(key)
        if pair is None:
            pair = load()
            if self._writable:
                self._keep(key, pair)
        return pair

    def read(self, key: Key) -> Pair | None:
        """Return the sample as read-only views of its file, of which only the pages that are used are read.

        None if it is not there, has another version, or is damaged; a warning names a damaged file.
        """
        path, digest = self.path(key[0]), _digest(key)
        data: mmap.mmap | bytes
        try:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError:
            return None  # not there, or not ours to read
        except ValueError:  # an empty file cannot be mapped
            data = b""
        header = _Header.unpack(data[: _FIELDS.size + 4])
        if header is not None and header.digest != digest:
            return None
        if header is not None and self._intact(data, header):
            return header.views(data)
        warnings.warn(f"'{path}' is damaged: the sample is decoded and the file made again", stacklevel=2)
        return None

    def write(self, key: Key, image: NDArray[np.uint8], mask: NDArray[np.uint8]) -> None:
        """Keep a sample: image uint8 (H, W, 3), mask uint8 (H, W).

        Raises:
            OSError: the folder cannot be written.
            DataError: the arrays are not such.
        """
        if not image.dtype == mask.dtype == np.uint8 or mask.ndim != 2 or image.shape != (*mask.shape, 3):
            raise DataError(
                f"the sample '{key[0]}' cannot be cached: image {image.dtype} {image.shape} and mask "
                f"{mask.dtype} {mask.shape} must be uint8 (H, W, 3) and uint8 (H, W); check what load() returns"
            )
        pieces = [image.tobytes(), b"", mask.tobytes()]
        pieces[1] = bytes(-len(pieces[0]) % _PAGE)
        checksum = 0
        for piece in pieces:
            checksum = zlib.crc32(piece, checksum)
        header = _Header(mask.shape[0], mask.shape[1], _digest(key), checksum)
        path = self.path(key[0])
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("wb") as file:
            file.write(header.pack())
            file.writelines(pieces)

    def path(self, which: str) -> Path:
        """Return the file of the sample that the first half of a key names."""
        name = hashlib.blake2b(os.fsencode(which), digest_size=16).hexdigest()
        return self.folder / name[:2] / f"{name[2:]}{_ENDING}"

    @staticmethod
    def file_size(shape: tuple[int, int]) -> int:
        """Return how many bytes the file of a sample of this height and width has."""
        return _Header(*shape, b"", 0).file_size

    def prune(self, keep: Iterable[str]) -> tuple[int, int]:
        """Remove the files of all samples but those in `keep` (first halves of keys), and what killed writers left.

        Returns how many files, and how many bytes.
        """
        kept = {self.path(which) for which in keep}
        count = size = 0
        for path in self.folder.glob("[0-9a-f][0-9a-f]/*"):
            try:
                facts = path.stat()
            except FileNotFoundError:
                continue  # its writer has just given it its name
            left = path.name.endswith(".tmp") and time.time() - facts.st_mtime > _ABANDONED
            if left or (path.name.endswith(_ENDING) and path not in kept):
                path.unlink()
                count, size = count + 1, size + facts.st_size
        return count, size

    def _keep(self, key: Key, pair: Pair) -> None:
        try:
            self.write(key, *pair)
        except OSError as error:
            self._writable = False
            warnings.warn(
                f"cannot write to the cache '{self.folder}' ({error.strerror or error}): samples that are not in "
                "it are decoded each time; make room, or name another folder",
                stacklevel=3,
            )

    def _intact(self, data: mmap.mmap | bytes, header: _Header) -> bool:
        if len(data) != header.file_size:
            return False
        if header.digest not in self._verified:
            with memoryview(data) as view, view[_PAGE:] as pixels:
                if zlib.crc32(pixels) != header.checksum:
                    return False
            self._verified.add(header.digest)
        return True


class _Header(NamedTuple):
    height: int
    width: int
    digest: bytes
    checksum: int

    @classmethod
    def unpack(cls, data: bytes) -> _Header | None:
        """Return the header, or None if it is damaged; that of another format fits no sample."""
        if len(data) < _FIELDS.size + 4:
            return None
        magic, version, *fields = _FIELDS.unpack_from(data)
        if magic == _MAGIC and version != _FORMAT:
            return cls(0, 0, b"", 0)
        whole = zlib.crc32(data[: _FIELDS.size]) == int.from_bytes(data[_FIELDS.size :], "little")
        return cls(*fields) if magic == _MAGIC and whole else None

    def pack(self) -> bytes:
        fields = _FIELDS.pack(_MAGIC, _FORMAT, *self)
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
