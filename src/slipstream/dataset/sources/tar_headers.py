"""Read the names, offsets and sizes of the files in a tar archive, which may be damaged or malicious.

`tarfile` is not used because it stops at a damaged header without an error, and creates an object for every header,
which takes a minute for a million files.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from slipstream.errors import DataError

__all__ = ["TarMember", "tar_members"]

_BLOCK = 512
_MAX_EXTENDED = 2**20
"""Maximum size in bytes of an extended header, which contains only the name and attributes of the next file."""
_RECORD = 10_240
"""Default record size in bytes. Writers pad an archive to a multiple of this size."""
_FILES = (b"0", b"\0", b"7")
_LINKS = {b"1": "a hard link", b"2": "a symbolic link"}
_FOLDER, _LONG_NAME, _ATTRIBUTES = b"5", b"L", b"x"
_IGNORED_TYPES = (b"g", b"K")  # attributes of all files, and the target of a link
_EXTENDED = (_LONG_NAME, _ATTRIBUTES, *_IGNORED_TYPES)


class TarMember(NamedTuple):
    """A file in an archive."""

    name: str
    offset: int
    """Offset of the file's first byte from the start of the archive."""
    size: int


class _Header(NamedTuple):
    name: bytes
    size: int
    kind: bytes


def tar_members(path: Path) -> Iterator[TarMember]:
    """Yield the regular files of an uncompressed tar archive (ustar, GNU or pax format) in order.

    Raises:
        DataError: the archive cannot be read; is compressed, damaged or incomplete; or contains a link, a device or a
            sparse file.
    """
    try:
        with path.open("rb") as file:
            yield from _members(file, path, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise DataError(
            f"cannot read '{path}': {error.strerror or error}; check the file and its permissions"
        ) from error


def _members(file: BinaryIO, path: Path, end: int) -> Iterator[TarMember]:
    position, name, size = 0, None, None
    while True:
        file.seek(position)
        header = _parse(file.read(_BLOCK), path, position)
        if header is None:
            _check_end(file, path, position)
            return
        length = header.size if size is None or header.kind in _EXTENDED else size
        start = position + _BLOCK
        if length > end - start:
            raise DataError(
                f"'{path}' is incomplete: {_quote(name or header.name)} has {length:,} bytes, but the archive ends "
                f"after {max(0, end - start):,} of them; copy the archive again"
            )
        position = start + length + -length % _BLOCK
        if header.kind in (_LONG_NAME, _ATTRIBUTES):
            content = _read_extended_header(file, path, length)
            if header.kind == _LONG_NAME:
                name = content.rstrip(b"\0")
            else:
                attributes = _attributes(content, path, start)
                name = attributes.get(b"path", name)
                size = _decimal(attributes[b"size"], path, start) if b"size" in attributes else size
        elif header.kind not in _IGNORED_TYPES:
            if header.kind != _FOLDER:
                member_name = name or header.name
                _check_kind(header.kind, member_name, path)
                yield TarMember(os.fsdecode(member_name), start, length)
            name = size = None


def _check_end(file: BinaryIO, path: Path, position: int) -> None:
    """Raise an error if the file contains nonzero bytes after the block at `position`, which ends the archive.

    Writers pad an archive with zeros to a multiple of the record size. If there are more zeros than fit in a record,
    issue a warning.
    """
    zeros = _BLOCK
    while content := file.read(2**20):
        if any(content):
            raise DataError(
                f"'{path}' contains data after the end of the archive at byte {position:,}: it is damaged, or consists "
                "of several archives; copy the file again, or extract the archives and create one archive"
            )
        zeros += len(content)
    if zeros > _RECORD:
        warnings.warn(
            f"'{path}' ends with {zeros:,} zero bytes, more than normal padding. It may be an incomplete copy with "
            "missing samples; compare its size with that of the original",
            stacklevel=2,
        )


def _parse(block: bytes, path: Path, position: int) -> _Header | None:
    """Parse a header block; return None for the block of zeros that ends an archive."""
    if len(block) < _BLOCK:
        if position == 0:
            raise DataError(
                f"'{path}' is not a tar archive: it has fewer than {_BLOCK} bytes; copy it again, or remove it"
            )
        raise DataError(f"'{path}' is incomplete: it has no end-of-archive block; copy the file again")
    if not any(block):
        return None
    expected = _parse_number(block[148:156])
    if expected != sum(block[:148]) + sum(block[156:]) + 8 * ord(" "):
        if position == 0:
            raise DataError(
                f"'{path}' is not an uncompressed tar archive. Compressed archives do not support random access; "
                "decompress the file first"
            )
        raise DataError(
            f"'{path}' is damaged: the header at byte {position:,} has a wrong checksum; copy the file again"
        )
    size = _parse_number(block[124:136])
    if size is None or size < 0:
        raise DataError(
            f"'{path}' is damaged: the header at byte {position:,} has an invalid size; copy the file again"
        )
    name = block[:100].partition(b"\0")[0]
    if block[257:263] == b"ustar\0" and (prefix := block[345:500].partition(b"\0")[0]):
        name = prefix + b"/" + name
    return _Header(name, size, block[156:157])


def _parse_number(field: bytes) -> int | None:
    """Parse an octal or (in the GNU format) binary number in a header; return None if it is invalid."""
    if field[0] in (0x80, 0xFF):
        return int.from_bytes(field[1:], "big", signed=False) if field[0] == 0x80 else -1
    digits = field.strip(b" \0")
    return int(digits or b"0", 8) if all(digit in b"01234567" for digit in digits) else None


def _read_extended_header(file: BinaryIO, path: Path, size: int) -> bytes:
    if size > _MAX_EXTENDED:
        raise DataError(
            f"'{path}' is damaged: it contains an extended header of {size:,} bytes, more than {_MAX_EXTENDED:,}; "
            "copy the file again"
        )
    return file.read(size)


def _attributes(content: bytes, path: Path, start: int) -> dict[bytes, bytes]:
    """Return the records of a pax header. Each record is `LENGTH KEY=VALUE`, followed by a newline."""
    records, position = {}, 0
    while position < len(content) and content[position]:
        length = _decimal(content[position : position + 8].partition(b" ")[0], path, start)
        key, equals, value = content[position : position + length].partition(b" ")[2].partition(b"=")
        if length > len(content) - position or not equals or not value.endswith(b"\n"):
            raise DataError(
                f"'{path}' is damaged: the extended header at byte {start:,} is invalid; copy the file again"
            )
        if key.startswith(b"GNU.sparse."):
            raise DataError(
                f"'{path}' contains a sparse file, which is not supported; store it as a regular file"
            )
        records[key] = value[:-1]
        position += length
    return records


def _decimal(digits: bytes, path: Path, start: int) -> int:
    if not digits.isdigit() or len(digits) > 18:
        raise DataError(
            f"'{path}' is damaged: the extended header at byte {start:,} is invalid; copy the file again"
        )
    return int(digits)


def _check_kind(kind: bytes, name: bytes, path: Path) -> None:
    if kind in _LINKS:
        raise DataError(
            f"{_quote(name)} in '{path}' is {_LINKS[kind]}, and links are not followed; create the archive with the "
            "contents of the file (tar --dereference --hard-dereference)"
        )
    if kind not in _FILES:
        raise DataError(
            f"{_quote(name)} in '{path}' is not a regular file (type {kind!r}); create the archive without it"
        )


def _quote(name: bytes) -> str:
    return repr(os.fsdecode(name)[:200])
