"""Resolve the path or URL of a checkpoint: download remote files and verify SHA-256 checksums."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.checkpoint.search import checkpoint_of
from slipstream.errors import CheckpointError, ConfigError
from slipstream.files import atomic_write, download, user_cache
from slipstream.logging import print_log

__all__ = ["download_checkpoint", "local_checkpoint", "redacted_source"]

_URL = r"([a-zA-Z][a-zA-Z0-9+.-]+(::|://))+"
_MAX_REASON_LENGTH = 200


@contextmanager
def local_checkpoint(path: str | Path, sha256: str | None = None) -> Iterator[Path]:
    """Yield the local path of a checkpoint, which may be a temporary download.

    Args:
        path: a file; a URL that fsspec supports, such as `hf://ORG/REPO/FILE.pth` or `https://HOST/FILE.pth`; the
            folder of a sharded checkpoint; or the folder of a run, for which the best checkpoint is used or, if none
            was saved, the latest checkpoint.
        sha256: the file's SHA-256 checksum. If it is set, a download is stored in the user's cache and reused.
            Otherwise, the download is removed at the end of the `with` block.

    Raises:
        ConfigError: `sha256` is not a SHA-256 checksum.
        CheckpointError: the download fails, the checksum differs, or the folder contains no checkpoint.
    """
    if sha256 is not None and not re.fullmatch("[0-9a-fA-F]{64}", str(sha256)):
        raise ConfigError(
            f"must be 64 hexadecimal digits, not {sha256!r}", "checkpoint_params.checkpoint_sha256"
        )
    expected = None if sha256 is None else str(sha256).lower()
    if not (isinstance(path, str) and re.match(_URL, path)):
        local = checkpoint_of(Path(path).expanduser())
        _check(local, expected, str(path))
        yield local
    elif expected is not None:
        yield _cached(path, expected)
    else:
        with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
            file = Path(folder) / "checkpoint.pth"
            download_checkpoint(path, file)
            yield file


def _cached(url: str, sha256: str) -> Path:
    file = user_cache("checkpoints") / f"{sha256}.pth"
    if not (file.is_file() and _digest(file) == sha256):
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as temporary:
            download_checkpoint(url, temporary)
            _check(temporary, sha256, redacted_source(url))
    return file


def _check(file: Path, sha256: str | None, source: str) -> None:
    if sha256 is None:
        return
    if not file.is_file():
        raise CheckpointError(f"{source} is not a file; checkpoint_params.checkpoint_sha256 requires a file")
    if (actual := _digest(file)) != sha256:
        raise CheckpointError(
            f"the SHA-256 checksum of {source} is {actual}, but checkpoint_params.checkpoint_sha256 is {sha256}; the "
            "file is damaged or is a different version"
        )


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def download_checkpoint(url: str, target: Path) -> None:
    """Write the contents of a URL to a file.

    Raises:
        CheckpointError: the download fails. In this case, the file may be incomplete.
    """
    source = redacted_source(url)
    print_log(f"downloading {source}", "current")
    try:
        download(url, target)
    except Exception as error:  # fsspec's file systems can raise any exception
        package = "; run: pip install huggingface_hub" * (isinstance(error, ImportError) and "hf:" in url)
        raise CheckpointError(
            f"{source} cannot be downloaded: {str(error).replace(url, source)[:_MAX_REASON_LENGTH]}{package}; check "
            "the URL and the network, or download the file on another machine and set checkpoint_path to it"
        ) from error


def redacted_source(path: str | Path) -> str:
    """Return a path as a string, or a URL without its credentials and its query, which may contain a signature."""
    if not (isinstance(path, str) and re.match(_URL, path)):
        return str(path)
    return re.sub(r"//[^/@]*@", "//", path.partition("?")[0])
