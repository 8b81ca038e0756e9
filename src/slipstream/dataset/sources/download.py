"""Download a dataset file, and verify its published checksum."""

from __future__ import annotations

import hashlib
from pathlib import Path

from slipstream.errors import DataError
from slipstream.files import download

__all__ = ["download_data"]


def download_data(url: str, target: Path, md5: str, remedy: str) -> None:
    """Write the contents of a URL to a file.

    Args:
        url: the URL.
        target: the file.
        md5: the MD5 checksum of the contents.
        remedy: what the user can do if the download fails; part of the error message.

    Raises:
        DataError: the download fails, or the checksum differs. The file is then incomplete or damaged.
    """
    try:
        download(url, target)
    except OSError as error:
        raise DataError(f"cannot download {url}: {error}. {remedy}") from error
    with target.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != md5:
        raise DataError(f"the download of {url} is damaged: its MD5 is {found}, expected {md5}; try again")
