"""Files in remote storage, accessed through fsspec."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.errors import MissingPackageError
from slipstream.openmmlab.mmengine.fileio.backends.base import BaseStorageBackend

__all__ = ["FsspecBackend"]


class FsspecBackend(BaseStorageBackend):
    """Read and write files through fsspec (`s3://`, `gs://`, `https://`, ...).

    Args:
        protocol: the protocol, such as `s3`.
        **options: options for the fsspec file system.

    Raises:
        MissingPackageError: if fsspec is not installed.
    """

    def __init__(self, protocol: str, **options: Any) -> None:
        try:
            import fsspec
        except ModuleNotFoundError as error:
            raise MissingPackageError(
                f"{protocol}:// paths require fsspec; run: pip install fsspec"
            ) from error
        self.protocol = protocol
        self.fs: Any = fsspec.filesystem(protocol, **options)

    def get(self, filepath: str) -> bytes:
        """Return the contents of a file."""
        content: bytes = self.fs.cat_file(filepath)
        return content

    def get_text(self, filepath: str, encoding: str = "utf-8") -> str:
        """Return the contents of a text file."""
        return self.get(filepath).decode(encoding)

    def put(self, obj: Any, filepath: str) -> None:
        """Write bytes or an `io.BytesIO` to a file."""
        self.fs.pipe_file(filepath, obj.getvalue() if hasattr(obj, "getvalue") else obj)

    def put_text(self, obj: str, filepath: str, encoding: str = "utf-8") -> None:
        """Write a string to a file."""
        self.put(obj.encode(encoding), filepath)

    def exists(self, filepath: str) -> bool:
        """Return whether a file or a folder with this path exists."""
        return bool(self.fs.exists(filepath))

    def isdir(self, filepath: str) -> bool:
        """Return whether a folder with this path exists."""
        return bool(self.fs.isdir(filepath))

    def isfile(self, filepath: str) -> bool:
        """Return whether a file with this path exists."""
        return bool(self.fs.isfile(filepath))

    def join_path(self, filepath: str, *filepaths: str) -> str:
        """Join the components of a path."""
        return "/".join([filepath.rstrip("/"), *(part.strip("/") for part in filepaths)])

    @contextmanager
    def get_local_path(self, filepath: str) -> Iterator[str | Path]:
        """Yield the path of a temporary local copy."""
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / Path(filepath).name
            copy.write_bytes(self.get(filepath))
            yield str(copy)

    def remove(self, filepath: str) -> None:
        """Remove a file."""
        self.fs.rm_file(filepath)

    def list_dir_or_file(
        self,
        dir_path: str,
        list_dir: bool = True,
        list_file: bool = True,
        suffix: str | tuple[str, ...] | None = None,
        recursive: bool = False,
    ) -> Iterator[str]:
        """Yield the paths in a folder, relative to the folder; see `mmengine.fileio.list_dir_or_file`."""
        root = self.fs._strip_protocol(dir_path).rstrip("/")
        entries = self.fs.find(dir_path, maxdepth=None if recursive else 1, withdirs=True, detail=True)
        for path, info in entries.items():
            name = path[len(root) :].strip("/")
            is_folder = info["type"] == "directory"
            if name and (list_dir if is_folder else list_file and (not suffix or name.endswith(suffix))):
                yield name
