"""Verify checkpoint files with the checksums that `torch.save` writes.

A file written by `torch.save` is a zip archive with a CRC-32 of each entry, which `torch.load` does not verify.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from mmap import ACCESS_READ, mmap
from pathlib import Path
from zipfile import ZIP_STORED, ZipFile, ZipInfo

from slipstream.cores import cores
from slipstream.errors import CheckpointError

try:  # about four times as fast as zlib
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["check_size", "verified", "verify"]

_HEADER = 30  # bytes of an entry's header, which its name and an extra field follow


@contextmanager
def verified(path: Path) -> Iterator[None]:
    """Verify `path` while the block reads it, in threads.

    Raises:
        CheckpointError: the file is damaged; replaces an error that the block raises for this reason.
    """
    with ThreadPoolExecutor(1) as pool:
        verification = pool.submit(verify, path)
        try:
            yield
        finally:
            verification.result()


def check_size(path: Path) -> None:
    """Check that the entries of a zip archive are not larger than the file. `torch.save` does not compress them.

    `torch.load` also reads compressed entries, and a small archive can contain any amount of compressed zeros.

    Raises:
        CheckpointError: an entry is compressed, or several entries share the same bytes.
    """
    try:
        with ZipFile(path) as archive:
            entries = archive.infolist()
    except Exception:  # another format, or a damaged archive, which `verify` reports
        return
    compressed = next((entry.filename for entry in entries if entry.compress_type != ZIP_STORED), None)
    if compressed is not None:
        raise CheckpointError(
            f"{path} is refused: its entry {compressed} is compressed, so it can expand to any size. torch.save does "
            "not compress; if you trust the file, load it with torch.load and save it again with torch.save"
        )
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise CheckpointError(f"{path} is damaged: its entries are larger than the file")


def verify(path: Path, start: int = 0, length: int | None = None) -> None:
    """Compare each entry of the zip archive in a part of the file with its checksum.

    The format of torch before 1.6, a pickle, has no checksums, so such a file is not verified.

    Raises:
        CheckpointError: an entry does not match its checksum, or the archive is incomplete.
    """
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path} is damaged: it is empty")
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as mapped:
        end = len(mapped) if length is None else start + length
        with memoryview(mapped) as content, content[start:end] as part:
            problem = None if bytes(part[:1]) == b"\x80" else _problem(part)
    if problem is not None:
        raise CheckpointError(f"{path} is damaged: {problem}")


def _problem(archive: memoryview) -> str | None:
    try:
        with ZipFile(_File(archive)) as opened:
            entries = opened.infolist()
    except Exception as error:  # a damaged archive can raise any exception
        return f"the archive cannot be read ({error})"
    with ThreadPoolExecutor(min(cores(), 8)) as pool:
        matches = list(pool.map(lambda entry: _matches(archive, entry), entries))
    wrong = [entry.filename for entry, match in zip(entries, matches, strict=True) if not match]
    return f"the checksum of {wrong[0]} does not match" if wrong else None


def _matches(archive: memoryview, entry: ZipInfo) -> bool:
    header = archive[entry.header_offset : entry.header_offset + _HEADER]
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    start = entry.header_offset + _HEADER + names
    content = archive[start : start + entry.file_size]
    return len(content) == entry.file_size and crc32(content) == entry.CRC


class _File(io.RawIOBase):
    """A memoryview as a file, from which `zipfile` reads the list of entries without copying the rest."""

    def __init__(self, content: memoryview) -> None:
        self._content, self._position = content, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._content)}[whence]
        if base + offset < 0:
            raise ValueError("negative position")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: object) -> int:
        with memoryview(buffer) as target:  # type: ignore[arg-type]
            found = self._content[self._position : self._position + len(target)]
            target[: len(found)] = found
        self._position += len(found)
        return len(found)
