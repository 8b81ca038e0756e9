"""The objects that a dataset uses: its attributes, their items and attributes, and the random generators in them."""

from __future__ import annotations

import copyreg
import functools
import random
import sys
from collections import deque
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

# Limits on the objects that are visited.
_MAX_OBJECTS, _MAX_ITEMS = 10_000, 1000
_GENERATORS = np.random.Generator, np.random.RandomState, random.Random, torch.Generator


def reachable(*roots: Any, code: bool = False) -> Iterator[Any]:
    """Yield objects, their items and their attributes, nearest first.

    Items of containers with more than 1000 items are omitted. An object that is found twice is yielded twice.

    Args:
        roots: the first objects.
        code: whether to also yield what the user's functions and methods refer to: class attributes, default values,
            variables of the enclosing function, and global variables.
    """
    seen: set[int] = set()
    values = deque(roots)
    while values:
        yield (value := values.popleft())
        if isinstance(value, str | bytes | int | float) or id(value) in seen or len(seen) >= _MAX_OBJECTS:
            continue
        seen.add(id(value))
        if isinstance(value, dict | list | tuple | set | deque):
            if len(value) <= _MAX_ITEMS:
                values += value
                # Not `items()`, whose tuples are temporary, so that two of them may have the same identity.
                values += value.values() if isinstance(value, dict) else ()
            continue
        if code:
            values += _referenced(value)
        if hasattr(value, "__dict__") and not isinstance(
            value, type | FunctionType | MethodType | ModuleType
        ):
            values.append(vars(value))
        if not isinstance(value, type | ModuleType):
            slots: list[str] = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
            values += (getattr(value, name, None) for name in slots)


def _referenced(value: Any) -> Iterator[Any]:
    """Yield what a function refers to, or the attributes of an object's class, unless a library defines it."""
    if isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, MethodType | staticmethod | classmethod):
        yield from (value.__func__, getattr(value, "__self__", None))
    elif isinstance(value, property):
        yield value.fget
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # the variable has no value yet
                continue
        yield value.__defaults__
        if not _is_library(value.__module__):
            yield from (value.__globals__.get(name) for name in _names(value.__code__))
    elif not isinstance(value, type | ModuleType):
        for kind in type(value).__mro__:
            yield from () if _is_library(kind.__module__) else tuple(vars(kind).values())


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


@functools.cache
def _is_library(module: str | None) -> bool:
    """Return whether a module belongs to Python or to an installed package."""
    root = (module or "").partition(".")[0]
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return root in sys.stdlib_module_names or root == "slipstream" or "-packages" in file


def find_generators(*roots: Any) -> list[Any]:
    """Return the random generators that objects use, except the global generators and those of accelerators."""
    excluded = {id(torch.default_generator), id(random._inst), id(np.random.mtrand._rand)}
    found: dict[int, Any] = {}
    for value in reachable(*roots, code=True):
        if isinstance(value, _GENERATORS) and id(value) not in excluded:
            on_device = isinstance(value, torch.Generator) and value.device.type != "cpu"
            if not on_device and not isinstance(value, random.SystemRandom):
                found[id(value)] = value
    return list(found.values())
