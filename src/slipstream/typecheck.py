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
    YAML and JSON have no tuples. Elements of lists, tuples and dicts are also checked.
    """
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(matches(value, arg) for arg in args)
    if origin is typing.Literal:
        return any(value == arg and type(value) is type(arg) for arg in args)
    if annotation is None or annotation is type(None):
        return value is None
    plain = origin or annotation
    if plain not in _PLAIN:
        return True
    if plain in (int, float):
        allowed = (int,) if plain is int else (int, float)
        return isinstance(value, allowed) and not isinstance(value, bool)
    if plain in (list, tuple):
        return isinstance(value, list | tuple) and _elements_match(value, plain, args)
    if plain is dict and args:
        return isinstance(value, dict) and all(
            matches(key, args[0]) and matches(item, args[1]) for key, item in value.items()
        )
    return isinstance(value, plain)


def _elements_match(values: Any, kind: type, args: tuple[Any, ...]) -> bool:
    if kind is list or args[1:] == (...,):  # all elements have the same type
        return all(matches(value, arg) for value in values for arg in args[:1])
    return not args or (len(values) == len(args) and all(map(matches, values, args)))


def describe(annotation: Any) -> str:
    """Return the annotation as text for an error message: `int`, `str or None`, `'a' or 'b'`, `list[int]`."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(arg) for arg in typing.get_args(annotation))
    if origin is typing.Literal:
        return " or ".join(repr(arg) for arg in typing.get_args(annotation))
    if annotation is type(None):
        return "None"
    name = getattr(annotation, "__name__", str(annotation))
    if origin in _PLAIN:
        return f"{name}[{', '.join('...' if arg is ... else describe(arg) for arg in typing.get_args(annotation))}]"
    return name
