"""Download a dataset file, and verify its published checksum."""

from __future__ import annotations

import hashlib
from pathlib import Path

from slipstream.errors import DataError
from slipstream.files import download

__all__ = ["download_data"]


def download_data(url: str, target: Path, md5: str, remedy: str) -> None:
    """Download a file and verify its MD5 checksum.

    Args:
        url: the URL to download.
        target: path of the file to write.
        md5: the expected MD5 checksum.
        remedy: advice for the user if the download fails, appended to the error message.

    Raises:
        DataError: the download fails, or the checksum differs. The file may then be incomplete or damaged.
    """
    try:
        download(url, target)
    except OSError as error:
        raise DataError(f"cannot download {url}: {error}. {remedy}") from error
    with target.open("rb") as file:
        actual = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if actual != md5:
        raise DataError(
            f"the file downloaded from {url} is damaged: its MD5 checksum is {actual}, expected {md5}; try again"
        )
