"""File and folder utilities."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["check_file_exist", "fopen", "is_abs", "is_filepath", "mkdir_or_exist", "scandir", "symlink"]


def is_filepath(x: Any) -> bool:
    """Return whether `x` is a string or a Path."""
    return isinstance(x, str | Path)


def is_abs(path: str) -> bool:
    """Return whether a path is an absolute path or a remote URL."""
    return Path(path).is_absolute() or path.startswith(("http://", "https://", "s3://"))


def fopen(filepath: str | Path, *args: Any, **kwargs: Any) -> Any:
    """Open a file."""
    return Path(filepath).open(*args, **kwargs)


def check_file_exist(filename: str | Path, msg_tmpl: str = 'file "{}" does not exist') -> None:
    """Raise a FileNotFoundError if the file `filename` does not exist."""
    if not Path(filename).is_file():
        raise FileNotFoundError(msg_tmpl.format(filename))


def mkdir_or_exist(dir_name: str | Path, mode: int = 0o777) -> None:
    """Create a folder and its parents if they do not exist."""
    if str(dir_name):
        Path(dir_name).expanduser().mkdir(mode, parents=True, exist_ok=True)


def symlink(src: str | Path, dst: str | Path, overwrite: bool = True, **kwargs: Any) -> None:
    """Create a symlink `dst` to `src`; with `overwrite`, replace an existing file."""
    if overwrite and os.path.lexists(dst):
        Path(dst).unlink()
    Path(dst).symlink_to(src, **kwargs)


def scandir(
    dir_path: str | Path,
    suffix: str | tuple[str, ...] | None = None,
    recursive: bool = False,
    case_sensitive: bool = True,
) -> Iterator[str]:
    """Yield the paths of the files in a folder, relative to this folder. Hidden files are omitted.

    Args:
        dir_path: the folder.
        suffix: file name suffix, or a tuple of suffixes.
        recursive: also yield the files in subfolders.
        case_sensitive: whether the case of `suffix` matters.
    """
    suffixes = (suffix,) if isinstance(suffix, str) else suffix
    if suffixes and not case_sensitive:
        suffixes = tuple(item.lower() for item in suffixes)
    root = Path(dir_path)

    def scan(folder: Path) -> Iterator[str]:
        for entry in os.scandir(folder):
            if not entry.name.startswith(".") and entry.is_file():
                name = Path(entry.path).relative_to(root).as_posix()
                if suffixes is None or (name if case_sensitive else name.lower()).endswith(suffixes):
                    yield name
            elif recursive and entry.is_dir():
                yield from scan(Path(entry.path))

    return scan(root)
