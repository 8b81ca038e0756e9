"""Local and remote file access, and serialization as JSON, YAML and pickle."""

from slipstream.openmmlab.mmengine.fileio.backends import (
    BaseStorageBackend,
    FsspecBackend,
    HardDiskBackend,
    LocalBackend,
    backends,
    get_file_backend,
)
from slipstream.openmmlab.mmengine.fileio.file_client import FileClient
from slipstream.openmmlab.mmengine.fileio.io import (
    dict_from_file,
    dump,
    exists,
    get,
    get_local_path,
    get_text,
    isdir,
    isfile,
    join_path,
    list_dir_or_file,
    list_from_file,
    load,
    put,
    put_text,
    remove,
)

__all__ = [
    "BaseStorageBackend",
    "FileClient",
    "FsspecBackend",
    "HardDiskBackend",
    "LocalBackend",
    "backends",
    "dict_from_file",
    "dump",
    "exists",
    "get",
    "get_file_backend",
    "get_local_path",
    "get_text",
    "isdir",
    "isfile",
    "join_path",
    "list_dir_or_file",
    "list_from_file",
    "load",
    "put",
    "put_text",
    "remove",
]
