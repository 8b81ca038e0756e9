"""Storage backends."""

from slipstream.openmmlab.mmengine.fileio.backends.base import BaseStorageBackend
from slipstream.openmmlab.mmengine.fileio.backends.choose import backends, get_file_backend
from slipstream.openmmlab.mmengine.fileio.backends.fsspec_backend import FsspecBackend
from slipstream.openmmlab.mmengine.fileio.backends.local_backend import HardDiskBackend, LocalBackend

__all__ = [
    "BaseStorageBackend",
    "FsspecBackend",
    "HardDiskBackend",
    "LocalBackend",
    "backends",
    "get_file_backend",
]
