"""Parse one configuration file. Only Python files are executed; other formats are parsed as data."""

from __future__ import annotations

import ast
import json
import tomllib
import traceback
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from slipstream.config.config_dict import ConfigDict
from slipstream.config.placeholders import Placeholders
from slipstream.errors import ConfigError, did_you_mean

BASE = "_base_"
SUFFIXES = (".py", ".yaml", ".yml", ".json", ".toml")
# Objects of these types in Python files are not configuration values.
_CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


class Document(Protocol):
    """A parsed file. Its values can be read once its bases are loaded."""

    base_names: list[str]
    # The variables of a Python file, and the keys of its bases, from which it computes values.
    variables: frozenset[str]

    def values(self, bases: dict[str, Any]) -> dict[str, Any]:
        """Return only the values set in this file. `bases` contains the merged values of the file's bases."""


def open_document(source: str, path: Path, suffix: str) -> Document:
    """Parse `source` and return the document.

    Raises:
        ConfigError: the suffix is not in `SUFFIXES`, or the source has a syntax error.
    """
    if suffix not in SUFFIXES:
        hint = did_you_mean(suffix, SUFFIXES)
        raise ConfigError(
            f"{path}: the file suffix must be one of {', '.join(SUFFIXES)}, not '{suffix}'{hint}"
        )
    if suffix == ".py":
        return PythonDocument(source, path)
    return DataDocument(source, path, suffix)


class DataDocument:
    """A YAML, JSON or TOML file. Its text is parsed as data and is never executed or evaluated."""

    def __init__(self, source: str, path: Path, suffix: str) -> None:
        self._placeholders = Placeholders(source, path, quote=suffix in (".json", ".toml"))
        try:
            tree = _PARSERS[suffix](self._placeholders.text)
        except Exception as error:  # each parser has its own exceptions, which give the line
            raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
        if not isinstance(tree, dict):
            raise ConfigError(f"{path}: the top level must be a mapping, got {type(tree).__name__}")
        self.base_names = _base_names(self._placeholders.fill(tree.pop(BASE, [])), path)
        self._tree = tree
        self.variables: frozenset[str] = frozenset()

    def values(self, bases: dict[str, Any]) -> dict[str, Any]:
        """Return the values of the file, with placeholders replaced."""
        self._placeholders.bases = bases
        return self._placeholders.fill(self._tree)


class PythonDocument:
    """A Python file, which is executed. Its `_base_` variable contains the values of its bases."""

    def __init__(self, source: str, path: Path) -> None:
        self._path = path
        self._placeholders = Placeholders(source, path, quote=False)
        try:
            self._module = ast.parse(self._placeholders.text, str(path))
        except (SyntaxError, ValueError) as error:
            location = f"{path}:{error.lineno}" if isinstance(error, SyntaxError) else str(path)
            raise ConfigError(f"{location}: {getattr(error, 'msg', error)}") from None
        self.base_names = self._take_base_names()
        self.variables = _read_names(self._module)

    def _take_base_names(self) -> list[str]:
        for statement in self._module.body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == BASE:
                self._module.body.remove(statement)
                try:
                    names = ast.literal_eval(statement.value)
                except ValueError:
                    message = "_base_ must be a literal string or list of strings"
                    raise ConfigError(f"{self._path}:{statement.lineno}: {message}") from None
                return _base_names(self._placeholders.fill(names), self._path)
        return []

    def values(self, bases: dict[str, Any]) -> dict[str, Any]:
        """Execute the file and return its variables, except modules, functions, classes and dunder names."""
        self._placeholders.bases = bases
        names: dict[str, Any] = {"__name__": "__config__", "__file__": str(self._path)}
        if self.base_names:
            names[BASE] = ConfigDict(bases)
        _PlaceholderFiller(self._placeholders, names).visit(self._module)
        try:
            exec(compile(self._module, str(self._path), "exec", dont_inherit=True), names)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            line = [frame.lineno for frame in frames if frame.filename == str(self._path)][-1:]
            location = ":".join([str(self._path), *map(str, line)])
            raise ConfigError(f"{location}: {type(error).__name__}: {error}") from error
        return {name: value for name, value in names.items() if self._is_value(name, value)}

    def _is_value(self, name: str, value: Any) -> bool:
        if name == BASE or name in self._placeholders or (name.startswith("__") and name.endswith("__")):
            return False
        # `from __future__ import annotations` defines a variable.
        return not isinstance(value, _CODE) and type(value).__module__ != "__future__"


class _PlaceholderFiller(ast.NodeTransformer):
    """Replace placeholder tokens with their values before the file is executed."""

    def __init__(self, placeholders: Placeholders, names: dict[str, Any]) -> None:
        self._placeholders = placeholders
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self._placeholders:
            self._names[node.id] = self._placeholders.fill(node.id)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            if node.value in self._placeholders:
                return self.visit_Name(ast.copy_location(ast.Name(node.value, ast.Load()), node))
            node.value = self._placeholders.fill(node.value)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        for part in node.values:
            if isinstance(part, ast.Constant):
                part.value = str(self._placeholders.fill(part.value))
            else:
                self.visit(part)
        return node


def _read_names(module: ast.Module) -> frozenset[str]:
    """Return the names that a configuration file reads: its own variables, and keys of its bases (`_base_.lr`)."""
    names = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == BASE:
            names.add(node.attr)
    return frozenset(names)


def _base_names(value: Any, path: Path) -> list[str]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{path}: _base_ must be a path or a list of paths, not {value!r}")
    return list(names)


def _parse_yaml(text: str) -> Any:
    import yaml  # imported here, because a Runner without configuration files does not need it

    from slipstream.config.yaml_format import Loader

    tree = yaml.load(text, Loader)
    return {} if tree is None else tree


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        keys = [key for key, _ in pairs]
        duplicate = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"duplicate key '{duplicate}'; remove one of the entries")
    return tree


_PARSERS: dict[str, Callable[[str], Any]] = {
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
    ".json": partial(json.loads, object_pairs_hook=_unique),
    ".toml": tomllib.loads,
}
