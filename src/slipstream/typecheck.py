"""Check option values from files and command lines against type annotations."""

from __future__ import annotations

import types
import typing
from typing import Any

__all__ = ["describe", "matches"]

_PLAIN = (bool, int, float, str, dict, list, tuple)


def matches(value: Any, annotation: Any) -> bool:
    """Return whether `value` matches `annotation`; annotations other than plain types accept any value.

    An int matches `float`. A bool matches neither `int` nor `float`. Lists and tuples are interchangeable, because
    YAML and JSON have no tuples.
    """
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(matches(value, arg) for arg in typing.get_args(annotation))
    if origin is typing.Literal:
        return value in typing.get_args(annotation)
    if annotation is None or annotation is type(None):
        return value is None
    plain = origin or annotation
    if plain not in _PLAIN:
        return True
    if plain in (int, float):
        allowed = (int,) if plain is int else (int, float)
        return isinstance(value, allowed) and not isinstance(value, bool)
    if plain in (list, tuple):
        return isinstance(value, list | tuple)
    return isinstance(value, plain)


def describe(annotation: Any) -> str:
    """Return the annotation as text for an error message: `int`, `str or None`, `'a' or 'b'`."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(arg) for arg in typing.get_args(annotation))
    if origin is typing.Literal:
        return " or ".join(repr(arg) for arg in typing.get_args(annotation))
    if annotation is type(None):
        return "None"
    return getattr(annotation, "__name__", str(annotation))
