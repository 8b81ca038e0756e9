"""Detect changes to classes whose code is part of a graph. Dynamo's guards do not detect these changes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter, is_, itemgetter
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

__all__ = ["ClassChanges"]

_MAX_OBJECTS = 20_000
_SPECIAL = {"__call__", "__getattr__", "__getattribute__"}
"""Special methods that a step may call; other special attributes, such as `__module__`, are ignored."""
_LIBRARIES = {*sys.stdlib_module_names, "builtins", "numpy", "tqdm"}
"""Packages whose classes do not affect the computation of a model. Every new progress bar changes tqdm's class."""
_PLAIN = (Tensor, np.ndarray, str, bytes, int, float, complex, bool, type(None), ModuleType)
_CODE = attrgetter("__code__")


class ClassChanges:
    """Detects changes to the classes of all objects that are reachable from a step.

    For each class, the methods, the properties, and the attributes that methods read are compared.

    Args:
        roots: modules, functions and objects that the step calls.
    """

    def __init__(self, *roots: Any) -> None:
        classes = dict.fromkeys(
            base for kind in _reachable_classes(roots) for base in kind.__mro__ if _may_affect_step(base)
        )
        read = set().union(*(_names_read(base) for base in classes))
        self._watched = [_WatchedClass(base, read) for base in classes]

    def find(self) -> str | None:
        """Return the name of a class that has changed, or None if none has. This method is called at every step."""
        return next((watched.kind.__qualname__ for watched in self._watched if watched.changed()), None)


class _WatchedClass:
    """The attributes of a class that methods may read.

    Args:
        kind: the class.
        read: names of all attributes that the step's methods read.
    """

    def __init__(self, kind: type, read: set[str]) -> None:
        self.kind, self._read = kind, read
        self._all: Mapping[str, Any] = vars(kind)
        self._size = len(self._all)
        names = self._names()
        # itemgetter returns a tuple only if it is given at least two names.
        get = itemgetter(*names, names[0]) if names else lambda _: ()
        self._get: Callable[[Mapping[str, Any]], tuple[Any, ...]] = get
        self._values = self._get(self._all)
        self._functions = [value for value in self._values if isinstance(value, FunctionType)]
        self._codes = list(map(_CODE, self._functions))
        self._known = set(names)

    def _names(self) -> list[str]:
        if self.kind.__module__.startswith("torch."):
            return [name for name in ("forward",) if name in self._all]
        return [name for name, value in self._all.items() if name in self._read or _is_code(name, value)]

    def changed(self) -> bool:
        """Return whether an attribute was replaced, added or deleted, or the code of a method was replaced."""
        if len(self._all) != self._size:  # Python may add attributes, such as __annotations__
            if set(self._names()) != self._known:
                return True
            self._size = len(self._all)
        try:
            same = all(map(is_, self._get(self._all), self._values))
        except KeyError:
            return True
        return not (same and all(map(is_, map(_CODE, self._functions), self._codes)))


def _may_affect_step(kind: type) -> bool:
    return kind is not nn.Module and kind.__module__.partition(".")[0] not in _LIBRARIES


def _is_code(name: str, value: Any) -> bool:
    if name.startswith("__") and name not in _SPECIAL:
        return False
    return callable(value) or hasattr(value, "__get__")


def _names_read(kind: type) -> set[str]:
    """Return the names of globals and attributes that a class's functions use; empty for torch's classes."""
    if kind.__module__.startswith("torch."):
        return set()
    return set().union(*(_names_in(function.__code__) for function in _functions(kind)))


def _names_in(code: CodeType) -> set[str]:
    inner = (_names_in(const) for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*inner)


def _functions(kind: type) -> Iterator[FunctionType]:
    """Yield the functions that a class defines, including those inside properties and static methods."""
    for value in vars(kind).values():
        parts = (
            (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),)
        )
        yield from (part for part in parts if isinstance(part, FunctionType))


def _reachable_classes(roots: Iterable[Any]) -> set[type]:
    """Return the classes of all objects reachable from `roots` through references."""
    found: set[type] = set()
    stack = list(roots)
    seen: set[int] = set()
    while stack and len(seen) < _MAX_OBJECTS:
        value = stack.pop()
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen.add(id(value))
        kind = value if isinstance(value, type) else type(value)
        if kind not in found and any(map(_may_affect_step, kind.__mro__)):
            found.add(kind)
            stack += (
                function for base in kind.__mro__ if _is_user_code(base) for function in _functions(base)
            )
        stack += _references(value)
    return found


def _references(value: Any) -> Iterable[Any]:
    """Return the objects that a function, a container or an object refers to."""
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        if not _is_user_code(value):
            return ()
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_set(cell)]
        names = _names_in(value.__code__) & value.__globals__.keys()
        return [*cells, *(value.__globals__[name] for name in names)]
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    # Skip the attributes of classes and library objects; for example, a logger refers to all other loggers.
    if isinstance(value, type) or not _may_affect_step(type(value)):
        return ()
    return list(vars(value).values()) if hasattr(value, "__dict__") else ()


def _is_user_code(value: Any) -> bool:
    """Return whether a class or function is user code, rather than part of a library, torch or Slipstream."""
    return (value.__module__ or "").partition(".")[0] not in {*_LIBRARIES, "torch", "slipstream"}


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # the variable has not been assigned yet
        return False
