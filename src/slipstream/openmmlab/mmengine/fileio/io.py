"""Functions that read and write files through any backend."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from slipstream.errors import DataError
from slipstream.openmmlab.mmengine.fileio.backends import get_file_backend
from slipstream.openmmlab.mmengine.fileio.plain_pickle import load_plain

__all__ = [
    "dict_from_file",
    "dump",
    "exists",
    "get",
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

Args = Mapping[str, Any] | None


def get(filepath: str | Path, backend_args: Args = None) -> bytes:
    """Return the contents of a file."""
    content: bytes = get_file_backend(filepath, backend_args=backend_args).get(filepath)
    return content


def get_text(filepath: str | Path, encoding: str = "utf-8", backend_args: Args = None) -> str:
    """Return the contents of a text file."""
    text: str = get_file_backend(filepath, backend_args=backend_args).get_text(filepath, encoding)
    return text


def put(obj: Any, filepath: str | Path, backend_args: Args = None) -> None:
    """Write bytes or an `io.BytesIO` to a file."""
    get_file_backend(filepath, backend_args=backend_args).put(obj, filepath)


def put_text(obj: str, filepath: str | Path, backend_args: Args = None) -> None:
    """Write a string to a file."""
    get_file_backend(filepath, backend_args=backend_args).put_text(obj, filepath)


def exists(filepath: str | Path, backend_args: Args = None) -> bool:
    """Return whether a file or a folder with this path exists."""
    return bool(get_file_backend(filepath, backend_args=backend_args).exists(filepath))


def isdir(filepath: str | Path, backend_args: Args = None) -> bool:
    """Return whether a folder with this path exists."""
    return bool(get_file_backend(filepath, backend_args=backend_args).isdir(filepath))


def isfile(filepath: str | Path, backend_args: Args = None) -> bool:
    """Return whether a file with this path exists."""
    return bool(get_file_backend(filepath, backend_args=backend_args).isfile(filepath))


def join_path(filepath: str | Path, *filepaths: str | Path, backend_args: Args = None) -> str:
    """Join the components of a path."""
    return str(get_file_backend(filepath, backend_args=backend_args).join_path(filepath, *filepaths))


def get_local_path(filepath: str | Path, backend_args: Args = None) -> AbstractContextManager[str | Path]:
    """Return a context manager that yields the path of a local file with the same contents."""
    context: AbstractContextManager[str | Path]
    context = get_file_backend(filepath, backend_args=backend_args).get_local_path(str(filepath))
    return context


def remove(filepath: str | Path, backend_args: Args = None) -> None:
    """Remove a file."""
    get_file_backend(filepath, backend_args=backend_args).remove(filepath)


def list_dir_or_file(
    dir_path: str | Path,
    list_dir: bool = True,
    list_file: bool = True,
    suffix: str | tuple[str, ...] | None = None,
    recursive: bool = False,
    backend_args: Args = None,
) -> Iterator[str]:
    """Yield the paths of the files and subfolders in a folder, relative to this folder.

    Args:
        dir_path: the folder.
        list_dir: yield subfolders.
        list_file: yield files, except hidden local files.
        suffix: file name suffix, or a tuple of suffixes; for local folders, requires `list_dir=False`.
        recursive: also yield the contents of subfolders.
        backend_args: see `get_file_backend`.
    """
    backend = get_file_backend(dir_path, backend_args=backend_args)
    yield from backend.list_dir_or_file(dir_path, list_dir, list_file, suffix, recursive)


def list_from_file(
    filename: str | Path,
    prefix: str = "",
    offset: int = 0,
    max_num: int = 0,
    encoding: str = "utf-8",
    file_client_args: Args = None,
    backend_args: Args = None,
) -> list[str]:
    """Return the lines of a text file, with `prefix` prepended to each line.

    The first `offset` lines are skipped, and at most `max_num` lines are returned (0 means no limit).
    """
    text = get_text(filename, encoding, backend_args or file_client_args)
    lines = [prefix + line.rstrip("\r\n") for line in io.StringIO(text)]
    return lines[offset : offset + max_num if max_num else None]


def dict_from_file(
    filename: str | Path,
    key_type: Any = str,
    encoding: str = "utf-8",
    file_client_args: Args = None,
    backend_args: Args = None,
) -> dict[Any, Any]:
    """Read a dict from a text file. Each line contains a key followed by one or more values."""
    result: dict[Any, Any] = {}
    for line in list_from_file(filename, encoding=encoding, backend_args=backend_args or file_client_args):
        key, *values = line.split()
        result[key_type(key)] = values if len(values) > 1 else values[0]
    return result


_FORMATS = {"json": "json", "yaml": "yaml", "yml": "yaml", "pkl": "pickle", "pickle": "pickle"}


def load(
    file: Any,
    file_format: str | None = None,
    file_client_args: Args = None,
    backend_args: Args = None,
    **kwargs: Any,
) -> Any:
    """Return the contents of a JSON, YAML or pickle file.

    Pickle files may contain only built-in types, NumPy arrays and tensors, because unpickling other objects can
    execute code.

    Args:
        file: a path or an open file.
        file_format: `json`, `yaml` or `pkl`. Default: the suffix of the path.
        file_client_args, backend_args: see `get_file_backend`.
        **kwargs: arguments for `json.loads`.

    Raises:
        DataError: if the format is unknown, or the pickle contains other objects.
    """
    kind = _format(file, file_format)
    if hasattr(file, "read"):
        content = file.read()
    else:
        content = get(file, backend_args or file_client_args)
    if kind == "pickle":
        return load_plain(content)
    text = content.decode("utf-8") if isinstance(content, bytes) else content
    return json.loads(text, **kwargs) if kind == "json" else yaml.safe_load(text)


def dump(
    obj: Any,
    file: Any = None,
    file_format: str | None = None,
    file_client_args: Args = None,
    backend_args: Args = None,
    **kwargs: Any,
) -> Any:
    """Write `obj` to a JSON, YAML or pickle file. If `file` is None, return a string (bytes for pickle) instead.

    Args:
        obj: the object; for JSON, it may contain NumPy arrays and scalars, sets and ranges.
        file: a path or an open file.
        file_format: `json`, `yaml` or `pkl`. Default: the suffix of the path.
        file_client_args, backend_args: see `get_file_backend`.
        **kwargs: arguments for `json.dumps`, `yaml.safe_dump` or `pickle.dumps`.

    Raises:
        DataError: if the format is unknown.
    """
    kind = _format(file, file_format)
    content: str | bytes
    if kind == "pickle":
        content = pickle.dumps(obj, **{"protocol": 2, **kwargs})
    elif kind == "json":
        content = json.dumps(obj, **{"default": _jsonable, **kwargs})
    else:
        content = yaml.safe_dump(obj, **kwargs)
    if file is None:
        return content
    if hasattr(file, "write"):
        file.write(content)
    else:
        put(content.encode() if isinstance(content, str) else content, file, backend_args or file_client_args)
    return None


def _format(file: Any, file_format: str | None) -> str:
    name = file_format or (Path(str(file)).suffix[1:] if isinstance(file, str | Path) else "")
    if name not in _FORMATS:
        raise DataError(f"the file format '{name}' is not supported; use one of {', '.join(_FORMATS)}")
    return _FORMATS[name]


def _jsonable(value: Any) -> Any:
    if isinstance(value, set | range):
        return list(value)
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise DataError(f"an object of type {type(value).__name__} is not JSON serializable; convert it first")
