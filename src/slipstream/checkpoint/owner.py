"""Record, in the lock file of an output folder, which run writes to the folder."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["LOCK_FILE", "describe_owner", "folder_owner"]

LOCK_FILE = ".lock"
"""The first line describes the process that holds the lock. The rest is the path of the run's work_dir relative to the
folder. This path remains valid if both are moved together."""


def describe_owner(folder: Path, work_dir: Path) -> str:
    """Return the line of the lock file that identifies the owner of `folder`."""
    return os.path.relpath(work_dir.resolve(), folder.resolve())


def folder_owner(folder: Path) -> Path | None:
    """Return the resolved work_dir of the run that writes to `folder`, or None if it is unknown."""
    file = folder / LOCK_FILE
    if not file.is_file():
        return None
    _, _, owner = file.read_text(encoding="utf-8", errors="surrogateescape").partition("\n")
    return Path(os.path.normpath(folder.resolve() / owner)) if owner else None
