"""Find the names that a function's code refers to, and the modules that belong to Python or to installed packages."""

from __future__ import annotations

import dis
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

__all__ = ["global_names", "imported_names", "is_known", "is_known_function", "names_in", "version_of"]

_VERSIONED_PACKAGES = ("torch", "slipstream")
"""Packages whose version replaces their code in the cache key, wherever they are installed."""
_FOLDERS = ("site-packages", "dist-packages")


def names_in(code: CodeType) -> frozenset[str]:
    """Return the names of the global variables and attributes that a function and its nested functions use."""
    return frozenset(name for part in _code_objects(code) for name in part.co_names)


def global_names(code: CodeType) -> set[str]:
    """Return the names of the global variables that a function and its nested functions read."""
    return {
        str(instruction.argval)
        for part in _code_objects(code)
        for instruction in dis.get_instructions(part)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }


def imported_names(code: CodeType, scope: Mapping[str, Any]) -> Iterator[str]:
    """Yield the absolute names of the modules that a function and its nested functions import.

    Args:
        code: the code of the function.
        scope: the global variables of the function, whose `__package__` is used to resolve relative imports.
    """
    for part in _code_objects(code):
        instructions = [each for each in dis.get_instructions(part) if each.opname != "EXTENDED_ARG"]
        for index, instruction in enumerate(instructions):
            if instruction.opname == "IMPORT_NAME":
                # The bytecode loads the level, the names and the module, in this order.
                level = instructions[index - 2].argval
                name = "." * level + str(instruction.argval)
                yield importlib.util.resolve_name(name, scope.get("__package__") or "") if level else name


def is_known(module: str) -> bool:
    """Return whether a module belongs to Python or to an installed package, which users do not edit."""
    package = module.partition(".")[0]
    if package in _VERSIONED_PACKAGES or package in sys.stdlib_module_names - {"__main__"}:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    if module not in sys.modules:
        spec = importlib.machinery.PathFinder.find_spec(package)
        file = None if spec is None else spec.origin
    return any(folder in str(file) for folder in _FOLDERS)


def is_known_function(function: FunctionType) -> bool:
    """Return whether both a function and the function that it wraps belong to known modules.

    `functools.wraps` sets `__module__` to that of the wrapped function, so the module of the code is also checked.
    """
    return is_known(str(function.__module__)) and is_known(str(function.__globals__.get("__name__")))


def version_of(module: str) -> str:
    """Return the version of the package that contains a module, or an empty string if it is unknown."""
    return str(getattr(sys.modules.get(module.partition(".")[0]), "__version__", ""))


def _code_objects(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of its nested functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_objects(constant)
