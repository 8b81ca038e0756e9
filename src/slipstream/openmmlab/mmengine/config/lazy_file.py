"""Read pure Python style configurations: `with read_base():` imports base files, and other imports become lazy objects.

Like all Python configuration files, these files are executed, but modules outside the standard library (other than
`mmengine.config`) are not imported.
"""

from __future__ import annotations

import ast
import sys
import traceback
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.config.load import library_folder
from slipstream.errors import ConfigError, did_you_mean
from slipstream.openmmlab.mmengine.config.config_dict import FileDict, as_plain
from slipstream.openmmlab.mmengine.config.lazy import ConfigParsingError, LazyObject

__all__ = ["LazyFile", "is_lazy", "load_lazy"]

_BASE = "_base_"
_LAZY = "__lazy_object__"  # the name of `LazyObject` in rewritten files
# A file may define objects of these types, or import them from the standard library. They are not configuration values.
_CODE_TYPES = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


@dataclass(frozen=True)
class LazyFile:
    """The variables of a file, the names defined by imports, and the source text of all files, bases first.

    `imported` includes the names that base files import, but not variables that are imported from base files.
    """

    variables: dict[str, Any]
    imported: frozenset[str]
    text: str

    @property
    def values(self) -> dict[str, Any]:
        """The configuration values: all variables except modules, functions and classes."""
        return {
            name: as_plain(value)
            for name, value in self.variables.items()
            # `from __future__ import annotations` defines a variable.
            if not isinstance(value, _CODE_TYPES) and type(value).__module__ != "__future__"
        }


def is_lazy(source: str, path: Path) -> bool:
    """Return whether a Python file has no `_base_` and imports base files or modules outside the standard library.

    Raises:
        ConfigError: if the file has a syntax error.
    """
    tree = _parse(source, path)
    if any(_assigns_base(node) for node in ast.walk(tree)):
        return False
    return any(_is_lazy_node(node) for node in ast.walk(tree))


def _is_lazy_node(node: ast.AST) -> bool:
    if isinstance(node, ast.With):
        return _reads_base(node)
    if isinstance(node, ast.ImportFrom):
        if node.module == "mmengine" and [alias.name for alias in node.names] == ["Config"]:
            return False
        return node.level > 0 or not _is_eager(node.module or "")
    return isinstance(node, ast.Import) and not all(_is_eager(alias.name) for alias in node.names)


def load_lazy(path: Path, chain: tuple[Path, ...] = ()) -> LazyFile:
    """Read a file and its bases; `chain` lists the files that use this file as a base, outermost first.

    Raises:
        ConfigError: if a file is missing, is its own base, or raises an error.
        ConfigParsingError: if a file contains an import that is not supported.
    """
    if path.resolve() in [parent.resolve() for parent in chain]:
        raise ConfigError(
            f"{path}: a file cannot be its own base: {' -> '.join(map(str, (*chain, path)))}; "
            "remove one of these imports"
        )
    source = _read(path, chain)
    tree = _parse(source, path)
    bases = {module: load_lazy(file, (*chain, path)) for module, file in _take_bases(tree, path).items()}
    names: dict[str, Any] = {"__name__": "__config__", "__file__": str(path), _LAZY: LazyObject}
    imports = _Imports(path, names, bases)
    tree = ast.fix_missing_locations(imports.visit(tree))
    start = sum(_is_future(node) for node in tree.body)
    tree.body[start:start] = imports.packages()
    try:
        exec(compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True), names)
    except Exception as error:
        raise _with_location(error, path) from error
    variables = {name: value for name, value in names.items() if not name.startswith("__")}
    imported = imports.names.union(*(base.imported for base in bases.values()))
    text = "".join(base.text for base in bases.values())
    return LazyFile(variables, frozenset(imported), f"{text}{path}\n{source}\n")


def _with_location(error: Exception, path: Path) -> ConfigError:
    """Return an error that names the line of the configuration at which `error` was raised."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)][-1:]
    location = ":".join([str(path), *map(str, lines)])
    error_type = ConfigParsingError if isinstance(error, ConfigParsingError) else ConfigError
    return error_type(f"{location}: {type(error).__name__}: {error}")


class _Imports(ast.NodeTransformer):
    """Rewrite the import statements of a file.

    Imports of base files set variables. Modules from the standard library and `mmengine.config` are imported normally.
    All other imports create `LazyObject`s.
    """

    def __init__(self, path: Path, variables: dict[str, Any], bases: dict[str, LazyFile]) -> None:
        self.names: set[str] = set()
        self._path = path
        self._variables = variables
        self._bases = bases
        self._packages: dict[str, tuple[list[str], int]] = {}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        module = _module(node)
        if module in self._bases:
            self._take_names(node, self._bases[module])
            return None
        if any(alias.name == "*" for alias in node.names):
            raise ConfigParsingError(
                f"{self._path}:{node.lineno}: `from {module} import *` is only supported for base files, inside "
                "`with read_base():`"
            )
        self.names.update(alias.asname or alias.name for alias in node.names)
        if _is_eager(module):
            return node
        return [
            self._assign(alias.asname or alias.name, [module, alias.name], alias.lineno)
            for alias in node.names
        ]

    def visit_Import(self, node: ast.Import) -> Any:
        statements: list[ast.stmt] = []
        for alias in node.names:
            package = alias.name.split(".")[0]
            if _is_eager(alias.name):
                statements.append(ast.copy_location(ast.Import([alias]), node))
            elif alias.asname is not None:
                statements.append(self._assign(alias.asname, [alias.name], node.lineno))
            else:
                self._packages.setdefault(package, ([], node.lineno))[0].append(alias.name)
            self.names.add(alias.asname or package)
        return statements

    def packages(self) -> list[ast.stmt]:
        """Return the assignments for `import a.b` statements, one for each package."""
        return [self._assign(name, [modules], line) for name, (modules, line) in self._packages.items()]

    def _take_names(self, node: ast.ImportFrom, base: LazyFile) -> None:
        for alias in node.names:
            if alias.name == "*":
                self._variables.update({name: _base_value(value) for name, value in base.variables.items()})
            elif alias.name in base.variables:
                self._variables[alias.asname or alias.name] = _base_value(base.variables[alias.name])
            else:
                raise ConfigParsingError(
                    f"{self._path}:{node.lineno}: the base {_module(node)} has no variable '{alias.name}'"
                    f"{did_you_mean(alias.name, base.variables)}"
                )

    def _assign(self, name: str, arguments: list[Any], line: int) -> ast.stmt:
        location = f"{self._path}, line {line}"
        call = ", ".join([*map(repr, arguments), f"location={location!r}"])
        statement = ast.parse(f"{name} = {_LAZY}({call})").body[0]
        return ast.increment_lineno(statement, line - 1)


def _take_bases(tree: ast.Module, path: Path) -> dict[str, Path]:
    """Replace `with read_base():` with its imports, and return the file of each base module."""
    bases: dict[str, Path] = {}
    body: list[ast.stmt] = []
    for node in tree.body:
        if _assigns_base(node):
            raise ConfigParsingError(
                f"{path}:{node.lineno}: a pure Python style configuration cannot use _base_; import the base with "
                "`with read_base():`, or use _base_ in all files"
            )
        if not isinstance(node, ast.With):
            body.append(node)
            continue
        if not _reads_base(node):
            raise ConfigParsingError(
                f"{path}:{node.lineno}: `with read_base():` is the only `with` statement that is supported"
            )
        for statement in node.body:
            if not isinstance(statement, ast.ImportFrom) or statement.module is None:
                raise ConfigParsingError(
                    f"{path}:{statement.lineno}: only `from MODULE import NAME` is supported in read_base()"
                )
            bases[_module(statement)] = _base_file(statement, path)
            body.append(statement)
    tree.body = body
    return bases


def _base_file(node: ast.ImportFrom, path: Path) -> Path:
    """Return the path of a base module's file, resolved relative to the importing file or in an installed package."""
    parts = (node.module or "").split(".")
    if node.level:
        folder = path.parent.joinpath(*[".."] * (node.level - 1))
    elif len(parts) == 1:
        raise ConfigParsingError(
            f"{path}:{node.lineno}: the package '{parts[0]}' is not a configuration file; import a file in it, for "
            f"example with `from {parts[0]}.configs.NAME import *`"
        )
    else:
        folder = library_folder(parts.pop(0), f"{path}:{node.lineno}")
    return folder.joinpath(*parts[:-1], f"{parts[-1]}.py")


def _base_value(value: Any) -> Any:
    """Return a copy of a base file's value, with dicts that support attribute access, `merge` and nested updates."""
    return FileDict._wrap(value)


def _module(node: ast.ImportFrom) -> str:
    return "." * node.level + (node.module or "")


def _is_eager(module: str) -> bool:
    """Return whether a module is imported while the file is read (standard library modules and `mmengine.config`)."""
    if module.startswith("."):
        return False
    return module.split(".")[0] in sys.stdlib_module_names or module.startswith("mmengine.config")


def _assigns_base(node: ast.AST) -> bool:
    target = node.targets[0] if isinstance(node, ast.Assign) else None
    return isinstance(target, ast.Name) and target.id == _BASE


def _reads_base(node: ast.With) -> bool:
    call = node.items[0].context_expr
    function = call.func if isinstance(call, ast.Call) else None
    return len(node.items) == 1 and isinstance(function, ast.Name) and function.id == "read_base"


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _parse(source: str, path: Path) -> ast.Module:
    try:
        return ast.parse(source, str(path))
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno}: {error.msg}") from None
    except (ValueError, MemoryError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be parsed: {error}") from None


def _read(path: Path, chain: tuple[Path, ...]) -> str:
    label = f"{chain[-1]}: its base file {path}" if chain else str(path)
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{label} cannot be read: {getattr(error, 'strerror', None) or error}") from None
