"""Verify checkpoint files against the checksums that `torch.save` writes.

A file written by `torch.save` is a zip archive that contains a CRC-32 checksum of each entry. `torch.load` does not
verify these checksums.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast
from zipfile import ZIP_STORED, ZipFile, ZipInfo

from slipstream.checkpoint.crc import combine_checksums
from slipstream.checkpoint.threads import run_in_threads
from slipstream.cores import cores
from slipstream.errors import CheckpointError

try:  # about four times as fast as zlib
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["open_verified", "verify"]

_HEADER = 30  # size of an entry's header in bytes, excluding the name and the extra field that follow
_CHUNK = 2**22  # bytes per read: small enough to stay in the CPU cache until the checksum is computed


@contextmanager
def open_verified(
    path: Path, start: int = 0, length: int | None = None, all_entries: bool = True
) -> Iterator[IO[bytes]]:
    """Yield a part of `path` as a file for `torch.load`. An entry that a single call reads in full is verified.

    If `all_entries` is True, the other entries are verified at the end of the `with` block. Two kinds of files have no
    checksums and are not verified: files written by torch before 1.6, which are pickles, and files that `torch.save`
    writes after `torch.serialization.set_crc32_options(False)`, which contain zeros instead of checksums.

    Raises:
        CheckpointError: the file is damaged, its entries are compressed, or its entries overlap. This
            error replaces any error that the damage causes in the block.
    """
    with path.open("rb", buffering=0) as file, _Archive(path, file, start, length) as archive:
        if archive.is_pickle:
            yield io.BufferedReader(archive)
            return
        archive.read_entries()
        try:
            yield cast("IO[bytes]", archive)
        except Exception:  # a damaged file can raise any exception
            archive.verify_rest()
            raise
        if all_entries:
            archive.verify_rest()


def verify(path: Path, start: int = 0, length: int | None = None) -> None:
    """Verify each entry of the zip archive in a part of the file against its checksum.

    Raises:
        CheckpointError: see `open_verified`.
    """
    with open_verified(path, start, length):
        pass


class _Archive(io.RawIOBase):
    """A zip archive in a part of a file. An entry that a single call reads in full is verified against its checksum.

    Large entries are read by several threads. Each thread computes the checksums of the chunks that it reads.
    """

    def __init__(self, path: Path, file: io.FileIO, start: int, length: int | None) -> None:
        self._extra_threads = min(cores(), 8) - 1
        self._pool = ThreadPoolExecutor(max(self._extra_threads, 1))  # starts threads on demand
        self._path, self._file, self._lock = path, file, threading.Lock()
        rest = max(os.fstat(file.fileno()).st_size - start, 0)
        self._start, self._size = start, rest if length is None else min(length, rest)
        self._position = 0
        self._entries: dict[int, ZipInfo] = {}  # keys: positions of the data
        self._unread: dict[ZipInfo, int] = {}  # entries not yet verified, and their positions
        self.is_pickle = self._bytes(0, 1) == b"\x80"

    def read_entries(self) -> None:
        """Read the list of entries.

        Raises:
            CheckpointError: the archive is incomplete or compressed, or its entries overlap.
        """
        if self._size == 0:
            raise self._damaged("it is empty")
        try:
            with ZipFile(cast("IO[bytes]", self)) as opened:
                entries = opened.infolist()
        except Exception as error:  # a damaged archive can raise any exception
            raise self._damaged(f"the archive cannot be read ({error})") from error
        if entries and min(entry.header_offset for entry in entries) > 0:
            # `ZipFile` and torch would read different bytes.
            raise self._damaged("other data precedes the first entry")
        self._check_sizes(entries)
        has_checksums = any(entry.CRC for entry in entries)
        for entry in entries if has_checksums else ():
            header = self._bytes(entry.header_offset, _HEADER)
            name_length = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
            content = entry.header_offset + _HEADER + name_length
            self._entries[content], self._unread[entry] = entry, content
        self.seek(0)

    def verify_rest(self) -> None:
        """Verify the entries that have not been read.

        Raises:
            CheckpointError: an entry does not match its checksum.
        """
        rest = list(self._unread)
        for entry, matches in zip(rest, self._pool.map(self._matches, rest), strict=True):
            if not matches:
                raise self._mismatch(entry)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError("negative position")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: object) -> int:
        target = memoryview(buffer)[: max(self._size - self._position, 0)]  # type: ignore[arg-type]
        entry = self._entries.get(self._position)
        if entry is None or entry.file_size != len(target):
            self._fill(target, self._position)
        elif self._read(target, self._position) == entry.CRC:
            self._unread.pop(entry, None)
        else:
            raise self._mismatch(entry)
        self._position += len(target)
        return len(target)

    def close(self) -> None:
        self._pool.shutdown()
        super().close()

    def _check_sizes(self, entries: list[ZipInfo]) -> None:
        """Check that the entries are neither compressed nor larger than the file.

        `torch.save` does not compress entries. `torch.load` also accepts compressed entries, and a small
        compressed archive can expand to any size.
        """
        compressed = next((entry.filename for entry in entries if entry.compress_type != ZIP_STORED), None)
        if compressed is not None:
            raise CheckpointError(
                f"{self._path} was not loaded: its entry {compressed} is compressed, so it could expand to any size. "
                "torch.save does not compress entries; if you trust the file, load it with torch.load and save it "
                "again with torch.save"
            )
        if sum(entry.file_size for entry in entries) > self._size:
            raise self._damaged("its entries are larger than the file")

    def _read(self, target: memoryview, position: int) -> int:
        """Read an entry and return its checksum."""
        if len(target) <= _CHUNK:
            self._fill(target, position)
            return crc32(target)
        # Only the first chunk may be shorter, because `combine_checksums` requires the others to have equal lengths.
        ends = range(len(target) % _CHUNK or _CHUNK, len(target) + 1, _CHUNK)
        checksums = [0] * len(ends)

        def read(chunk: tuple[int, int]) -> None:
            index, end = chunk
            part = target[max(end - _CHUNK, 0) : end]
            self._fill(part, position + end - len(part))
            checksums[index] = crc32(part)  # while the chunk is in this core's cache

        run_in_threads(read, list(enumerate(ends)), self._pool, self._extra_threads)
        return combine_checksums(checksums, _CHUNK)

    def _matches(self, entry: ZipInfo) -> bool:
        position, rest, checksum = self._unread[entry], entry.file_size, 0
        if position + rest > self._size:
            return False
        buffer = memoryview(bytearray(min(rest, _CHUNK)))
        while rest:
            part = buffer[:rest]
            self._fill(part, position)
            checksum = crc32(part, checksum)
            position, rest = position + len(part), rest - len(part)
        return checksum == entry.CRC

    def _bytes(self, position: int, count: int) -> bytes:
        """Return `count` bytes, or fewer at the end of the archive."""
        data = bytearray(max(min(count, self._size - position), 0))
        self._fill(memoryview(data), position)
        return bytes(data)

    def _fill(self, target: memoryview, position: int) -> None:
        while target:
            count = self._read_some(target, self._start + position)
            if count == 0:
                raise self._damaged("it was truncated while it was being read")
            target, position = target[count:], position + count

    def _read_some(self, target: memoryview, position: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [target], position)
        with self._lock:  # Windows has no preadv, so the threads share the file position
            self._file.seek(position)
            return self._file.readinto(target) or 0

    def _mismatch(self, entry: ZipInfo) -> CheckpointError:
        return self._damaged(f"the checksum of {entry.filename} does not match")

    def _damaged(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is damaged: {problem}; use another checkpoint")
