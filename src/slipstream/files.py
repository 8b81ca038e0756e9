"""Atomic file writes, causes of failed writes, downloads, and file name checks."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.errors import ConfigError

# Seconds without data after which a download fails.
_DOWNLOAD_TIMEOUT = 60
# Maximum length, in bytes, of a checkpoint's configured name. Most file systems allow 255 bytes; the rest is
# used for the number and for the suffixes of shards, temporary files and replaced files.
CHECKPOINT_NAME_LENGTH = 215
_PROBED_BLOCKS, _PROBED_BYTES = 16, 2**16
_TEMPORARY_NAME = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")


def check_name(name: str, key: str, folder: str = "the work_dir", max_length: int | None = None) -> str:
    """Return `name`, a path relative to a folder, if it refers to a file inside the folder.

    Symlinks are not resolved, because the user created them.

    Args:
        name: the relative path; it may contain subfolders.
        key: config path of the name, for the error message.
        folder: description of the folder, for the error message.
        max_length: maximum length in bytes of the file's name and of each subfolder's name.

    Raises:
        ConfigError: the path is empty, absolute, outside the folder, or too long.
    """
    is_outside = Path(name).is_absolute() or Path(os.path.normpath(name)).parts[:1] == ("..",)
    if not name or "\0" in str(name) or is_outside:
        raise ConfigError(f"must be the name of a file inside {folder}, without '..', not {name!r}", key)
    length = max(len(part.encode("utf-8", "surrogatepass")) for part in (*Path(name).parts, ""))
    if max_length is not None and length > max_length:
        raise ConfigError(f"must be at most {max_length} bytes long, not {length}; use a shorter name", key)
    return name


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; rename the file written there to `path` if the block succeeds.

    Readers of `path` see either the old file or the complete new one, even after a power failure.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str, errors: str = "strict") -> None:
    """Write a text file as UTF-8 with `atomic_write`.

    Args:
        path: the file.
        text: the contents of the file; line endings are written unchanged.
        errors: how to handle characters that UTF-8 cannot represent; see `str.encode`.
    """
    with atomic_write(path) as temporary:
        temporary.write_bytes(text.encode("utf-8", errors))


def download(url: str, target: Path) -> None:
    """Write the contents of a URL to a file.

    After an error, the file may be incomplete; use `atomic_write` to prevent this.

    Args:
        url: an http or https URL, or another URL that fsspec supports.
        target: the file.

    Raises:
        OSError: the server cannot be reached, or the transfer ends early. fsspec's file systems can raise any
            exception.
    """
    import http.client
    import urllib.request

    try:
        if url.startswith(("http://", "https://")):  # avoids aiohttp, which fsspec requires for these URLs
            opened = urllib.request.urlopen(url, timeout=_DOWNLOAD_TIMEOUT)
        else:
            import fsspec

            opened = fsspec.open(url, "rb")
        with opened as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
            # At end of file, Python does not check the size against the Content-Length.
            missing = source.length if isinstance(source, http.client.HTTPResponse) else None
    except http.client.HTTPException as error:
        raise OSError(f"the transfer failed: {error}") from error
    if missing:
        raise OSError(f"the transfer ended {missing:,} bytes before the end of the file")


def check_space(path: Path) -> None:
    """Raise an OSError if no more data can be written to the file `path`, for example because the disk is full.

    Some libraries do not report why a write fails. This function appends bytes to the file, so the file must not be
    used afterwards.
    """
    with path.open("ab", buffering=0) as file:
        for _ in range(_PROBED_BLOCKS):
            file.write(bytes(_PROBED_BYTES))
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Write the folder's directory entries to disk, so that a power failure does not revert a rename in the folder."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_temporary_files(folder: Path) -> None:
    """Remove the temporary files in `folder` that were left by processes killed inside `atomic_write`.

    The caller must ensure that no other process writes to this folder.
    """
    for path in folder.glob(".*.tmp"):
        if path.is_file() and _TEMPORARY_NAME.fullmatch(path.name):
            path.unlink(missing_ok=True)


def user_cache(name: str) -> Path:
    """Return a folder in the user's cache (SLIPSTREAM_CACHE, XDG_CACHE_HOME/slipstream or ~/.cache/slipstream)."""
    if configured := os.environ.get("SLIPSTREAM_CACHE"):
        return Path(configured).expanduser().absolute() / name
    # As required by the XDG specification, ignore relative paths.
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "slipstream" / name
