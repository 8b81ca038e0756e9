"""Find the configuration files of installed libraries, which can be used as bases (`_base_ = "mmdet::PATH"`)."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.errors import ConfigError, did_you_mean

__all__ = ["SCOPE", "Base", "find_base", "library_folder", "set_scope"]

SCOPE = "_scope_"
"""Key in a dict with a `type`. Its value is the library that is searched first for the names in the dict."""

_NAME = re.compile(r"(\w+)::([^:]+)")


class Base(NamedTuple):
    """A base file and, if applicable, the library that contains it."""

    path: Path
    scope: str | None


def find_base(name: str, path: Path) -> Base:
    """Return the base file for `name`, an entry of `_base_` in the file `path`.

    `name` is either a path relative to the folder of `path`, or has the form `LIBRARY::PATH`. A library's configuration
    files are in the `.mim/configs` folder of its package.

    Raises:
        ConfigError: `name` is malformed, or the library is not installed or does not contain the file.
    """
    if "::" not in name:
        return Base(path.parent / name, None)
    match = _NAME.fullmatch(name)
    if match is None:
        raise ConfigError(f"{path}: '{name}' must have the form 'mmdet::retinanet/NAME.py'", "_base_")
    library, relative = match.groups()
    root = library_folder(library, str(path)) / ".mim/configs"
    file = root / relative
    if not file.resolve().is_relative_to(root.resolve()):
        raise ConfigError(
            f"{path}: '{name}' is outside the folder {root}; use a file in this folder", "_base_"
        )
    if not file.is_file():
        names = sorted(f.name for f in file.parent.glob("*.py")) if file.parent.is_dir() else []
        raise ConfigError(
            f"{path}: {library} has no configuration '{relative}' in {root}{did_you_mean(file.name, names)}",
            "_base_",
        )
    return Base(file, library)


def library_folder(library: str, source: str) -> Path:
    """Return the folder of an installed package without importing it.

    Raises:
        ConfigError: the package is not installed; the message starts with `source`.
    """
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:
        raise ConfigError(f"{source}: requires the package '{library}', which is not installed")
    return Path(spec.origin).parent


def set_scope(value: Any, scope: str) -> Any:
    """Return `value` with `_scope_` set in the outermost dicts that have a `type`."""
    if isinstance(value, dict):
        if "type" in value:
            return value if value.get(SCOPE) is not None else {**value, SCOPE: scope}
        return {key: set_scope(item, scope) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(set_scope(item, scope) for item in value)
    return value
