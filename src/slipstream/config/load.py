"""Load a configuration file and its bases."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.config.document import SUFFIXES, open_document
from slipstream.config.merge import merge
from slipstream.errors import ConfigError, did_you_mean

# Key in a dict with a `type`. Its value is the library that is searched first for the names in the dict.
SCOPE = "_scope_"

_NAME = re.compile(r"(\w+)::([^:]+)")


class LoadedConfig(NamedTuple):
    """The merged values of a file, and the source text of every file that was loaded, bases first."""

    values: dict[str, Any]
    text: str
    # The variables of Python files from which values are computed.
    variables: frozenset[str]


class Base(NamedTuple):
    """A base file and, if applicable, the library that contains it."""

    path: Path
    scope: str | None


# YAML, JSON and TOML files may import these packages, and modules that the program has already imported.
_IMPORTABLE = ("slipstream", "torch", "torchmetrics")
_TRUST = "If you trust the file, add --trust on the command line, or pass trust=True in Python"


def load_file(path: Path, chain: tuple[Path, ...] = (), trust: bool = False) -> LoadedConfig:
    """Load a file and its bases.

    Args:
        path: the file. If it is a Python file, it and its bases are trusted.
        chain: the files that have this file as a base, outermost first.
        trust: whether a YAML, JSON or TOML file may use a Python file as a base. The Python file is executed.

    Raises:
        ConfigError: the file is missing or unreadable, contains an error, or is its own base.
    """
    if path.resolve() in [parent.resolve() for parent in chain]:
        cycle = " -> ".join(str(file) for file in (*chain, path))
        raise ConfigError(f"{chain[0]}: a file cannot be its own base: {cycle}; remove one of these bases")
    return load_text(_read(path, chain), path, path.suffix.lower(), chain, trust)


def load_text(
    source: str, path: Path, suffix: str, chain: tuple[Path, ...] = (), trust: bool = False
) -> LoadedConfig:
    """Load `source` as if it were the contents of a file at `path`, in the format of `suffix`.

    Raises:
        ConfigError: see `load_file`.
    """
    try:
        document = open_document(source, path, suffix)
        base_files = [_find_base(name, path) for name in document.base_names]
        trust = trust or suffix == ".py"
        _check_trusted([base.path for base in base_files], path, trust)
        bases = _load_bases(base_files, (*chain, path), trust)
        own_values = document.values(bases.values)
        values = _merge(bases.values, own_values, path)
    except RecursionError:
        raise ConfigError(
            f"{path}: the values contain a cycle or are nested too deeply; simplify them"
        ) from None
    text = f"{bases.text}{path}\n{source}\n"
    return LoadedConfig(values, text, bases.variables | document.variables)


def _merge(base: dict[str, Any], override: dict[str, Any], path: Path) -> dict[str, Any]:
    try:
        return merge(base, override)
    except ConfigError as error:
        raise ConfigError(f"{error.args[0]} ({path})", error.path) from None


def _check_trusted(bases: list[Path], path: Path, trust: bool) -> None:
    for base in bases:
        if base.suffix.lower() == ".py" and not trust:
            raise ConfigError(
                f"{path} is not trusted to execute code, but its base {base} is a Python file. {_TRUST}",
                "_base_",
            )


def _load_bases(bases: list[Base], chain: tuple[Path, ...], trust: bool) -> LoadedConfig:
    values: dict[str, Any] = {}
    origin: dict[str, Path] = {}
    texts = []
    variables: frozenset[str] = frozenset()
    for path, scope in bases:
        base = load_file(path, chain, trust)
        for key in base.values:
            if key in origin:
                raise ConfigError(
                    f"{chain[-1]}: the bases {origin[key]} and {path} both set this key; "
                    "make one the base of the other, or remove the key from one of them",
                    key,
                )
            origin[key] = path
        values.update(base.values if scope is None else set_scope(base.values, scope))
        texts.append(base.text)
        variables |= base.variables
    return LoadedConfig(values, "".join(texts), variables)


def _read(path: Path, chain: tuple[Path, ...]) -> str:
    subject = f"{chain[-1]}: its base {path}" if chain else str(path)
    try:
        # Windows editors may write a byte order mark.
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{subject} does not exist{_nearest_file(path)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{subject} is not valid UTF-8 (byte {error.start}); convert it to UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{subject} cannot be read: {error.strerror}") from None


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; the folder {path.parent} does not exist either"
    return did_you_mean(
        path.name, sorted(file.name for file in path.parent.iterdir() if file.suffix in SUFFIXES)
    )


def _find_base(name: str, path: Path) -> Base:
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


def import_custom(values: dict[str, Any], source: str, trust: bool) -> None:
    """Import the modules in `custom_imports=dict(imports=[...], path=...)`, which register their classes.

    `path` is a folder that contains the modules. It is inserted at the start of `sys.path`.

    Args:
        values: the configuration.
        source: the configuration file, for error messages.
        trust: whether any module may be imported, and `path` may be set. By default, only modules that are already
            imported and modules from slipstream, torch and torchmetrics may be imported.

    Raises:
        ConfigError: the value is malformed, importing a module requires `trust`, or an import fails and
            `allow_failed_imports` is not set.
    """
    custom = values.get("custom_imports")
    if not custom:
        return
    names = custom.get("imports") if isinstance(custom, dict) else None
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"must be dict(imports=['package.module']), not {custom!r} ({source})", "custom_imports"
        )
    if (path := custom.get("path")) is not None:
        _insert_path(path, source, trust)
    for name in names:
        if not (trust or _is_importable(name)):
            raise ConfigError(
                f"{source} is not trusted to execute code, so the module '{name}' was not imported. {_TRUST}; or "
                "import the module in your program before it loads the file",
                "custom_imports",
            )
        try:
            importlib.import_module(name)
        except ImportError as error:
            if not custom.get("allow_failed_imports"):
                remedy = "install it, or set custom_imports.path to its folder"
                raise ConfigError(f"cannot import '{name}': {error}; {remedy} ({source})") from error


def _insert_path(path: Any, source: str, trust: bool) -> None:
    if not isinstance(path, str) or not Path(path).is_dir():
        raise ConfigError(
            f"must be an existing folder, not {path!r}; change this key in {source} (overrides are applied after the "
            "import)",
            "custom_imports.path",
        )
    if not trust:
        raise ConfigError(
            f"{source} is not trusted to execute code, so it cannot set this key. {_TRUST}",
            "custom_imports.path",
        )
    folder = str(Path(path).resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _is_importable(name: str) -> bool:
    package, *rest = name.split(".")
    return name in sys.modules or (package in _IMPORTABLE and "__main__" not in rest)
