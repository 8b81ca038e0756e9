"""Local files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.files import atomic_write
from slipstream.openmmlab.mmengine.fileio.backends.base import BaseStorageBackend

__all__ = ["HardDiskBackend", "LocalBackend", "list_files"]


class LocalBackend(BaseStorageBackend):
    """Read and write local files. Files are written atomically."""

    def __init__(self, **kwargs: Any) -> None:
        return

    def get(self, filepath: str | Path) -> bytes:
        """Return the contents of a file."""
        return Path(filepath).read_bytes()

    def get_text(self, filepath: str | Path, encoding: str = "utf-8") -> str:
        """Return the contents of a text file."""
        return Path(filepath).read_text(encoding)

    def put(self, obj: Any, filepath: str | Path) -> None:
        """Write bytes or an `io.BytesIO` to a file. Create parent folders if necessary."""
        content = obj.getvalue() if hasattr(obj, "getvalue") else obj
        Path(filepath).parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(Path(filepath)) as temporary:
            temporary.write_bytes(content)

    def put_text(self, obj: str, filepath: str | Path, encoding: str = "utf-8") -> None:
        """Write a string to a file. Create parent folders if necessary."""
        self.put(obj.encode(encoding), filepath)

    def exists(self, filepath: str | Path) -> bool:
        """Return whether a file or a folder with this path exists."""
        return Path(filepath).exists()

    def isdir(self, filepath: str | Path) -> bool:
        """Return whether a folder with this path exists."""
        return Path(filepath).is_dir()

    def isfile(self, filepath: str | Path) -> bool:
        """Return whether a file with this path exists."""
        return Path(filepath).is_file()

    def join_path(self, filepath: str | Path, *filepaths: str | Path) -> str:
        """Join the components of a path."""
        return os.path.join(filepath, *filepaths)  # noqa: PTH118  # keeps './' and '//', as MMEngine does

    @contextmanager
    def get_local_path(self, filepath: str | Path) -> Iterator[str | Path]:
        """Yield the path of a local file with the same contents."""
        yield filepath

    def copyfile(self, src: str | Path, dst: str | Path) -> str:
        """Copy a file and return the path of the copy."""
        return str(shutil.copy(src, dst))

    copyfile_from_local = copyfile
    copyfile_to_local = copyfile

    def remove(self, filepath: str | Path) -> None:
        """Remove a file."""
        Path(filepath).unlink()

    def rmtree(self, dir_path: str | Path) -> None:
        """Remove a folder and its contents."""
        shutil.rmtree(dir_path)

    def list_dir_or_file(
        self,
        dir_path: str | Path,
        list_dir: bool = True,
        list_file: bool = True,
        suffix: str | tuple[str, ...] | None = None,
        recursive: bool = False,
    ) -> Iterator[str]:
        """Yield the paths in a folder, relative to the folder; see `mmengine.fileio.list_dir_or_file`."""
        return list_files(Path(dir_path), list_dir, list_file, suffix, recursive)


class HardDiskBackend(LocalBackend):
    """An older name for `LocalBackend`."""


def list_files(
    root: Path, list_dir: bool, list_file: bool, suffix: str | tuple[str, ...] | None, recursive: bool
) -> Iterator[str]:
    """Yield the paths of files (except hidden files) and folders in `root`, relative to `root`."""
    if list_dir and suffix is not None:
        raise TypeError("suffix requires list_dir=False")

    def scan(folder: Path) -> Iterator[str]:
        for entry in os.scandir(folder):
            name = Path(entry.path).relative_to(root).as_posix()
            if not entry.is_dir():
                is_listed = list_file and not entry.name.startswith(".")
                if is_listed and (suffix is None or name.endswith(suffix)):
                    yield name
                continue
            if list_dir:
                yield name
            if recursive:
                yield from scan(Path(entry.path))

    return scan(root)
