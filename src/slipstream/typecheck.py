"""Check option values from configuration files and the command line against type annotations."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from slipstream.errors import ConfigError

T = TypeVar("T")
_BUILTIN_TYPES = (bool, int, float, str, dict, list, tuple)
_TYPE_NAMES = {Mapping: "dict", Sequence: "list", Callable: "a function"}


@dataclass(frozen=True)
class Rule:
    """A condition on values of an annotated type, used as `Annotated` metadata."""

    accepts: Callable[[Any], bool]
    # The condition, worded to follow the type in an error message, such as `of at least 1`.
    text: str


PositiveInt = Annotated[int, Rule(lambda value: value >= 1, "of at least 1")]
NonNegativeInt = Annotated[int, Rule(lambda value: value >= 0, "of at least 0")]
AllOrPositiveInt = Annotated[int, Rule(lambda value: value == -1 or value >= 1, "of at least 1, or -1")]
Positive = Annotated[float, Rule(lambda value: 0 < value < math.inf, "above 0")]
PositiveIntOrFraction = (
    PositiveInt | Annotated[float, Rule(lambda value: 0 < value <= 1, "above 0 and at most 1")]
)
NonNegative = Annotated[float, Rule(lambda value: 0 <= value < math.inf, "of at least 0")]
Probability = Annotated[float, Rule(lambda value: 0 <= value <= 1, "between 0 and 1")]
# A float, including infinity but not NaN. `float` without a rule matches only finite numbers.
Number = Annotated[float, Rule(lambda value: value == value, "other than NaN")]


def check(value: T, annotation: Any, path: str) -> T:
    """Return `value`, or raise a `ConfigError` at `path` unless it matches `annotation`."""
    if not matches(value, annotation):
        raise ConfigError(f"must be {describe_with_article(annotation)}, not {short_repr(value)}", path)
    return value


def is_number(value: Any) -> bool:
    """Return whether `value` is a finite int or float, but not a bool."""
    return is_real(value) and -math.inf < value < math.inf


def is_real(value: Any) -> bool:
    """Return whether `value` is an int or float, including NaN and infinity, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def matches(value: Any, annotation: Any) -> bool:
    """Return whether `value` matches `annotation`. Any value matches an annotation that is not supported.

    An int matches `float`. A bool matches neither `int` nor `float`, and NaN and infinity do not match `float`. Lists
    and tuples are interchangeable, because YAML and JSON have no tuples. Elements of lists, tuples and dicts are also
    checked. `Annotated` adds a `Rule`. `Mapping`, `Callable` and `Path` are matched by type only; `Sequence`
    matches any value with items, except strings and dicts.
    """
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _matches_rules(value, args[0], [rule for rule in args[1:] if isinstance(rule, Rule)])
    if origin in (typing.Union, types.UnionType):
        return any(matches(value, arg) for arg in args)
    if origin is typing.Literal:
        return any(value == arg and type(value) is type(arg) for arg in args)
    if annotation is None or annotation is type(None):
        return value is None
    base = origin or annotation
    if base is float:
        return is_number(value)
    if base is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if base in (list, tuple):
        return isinstance(value, list | tuple) and _elements_match(value, base, args)
    if base is dict and args:
        return isinstance(value, dict) and all(
            matches(key, args[0]) and matches(item, args[1]) for key, item in value.items()
        )
    if base is Sequence:
        return _is_sequence(value) and (
            not isinstance(value, list | tuple) or _elements_match(value, list, args)
        )
    if base in (*_BUILTIN_TYPES, Mapping, Path):
        return isinstance(value, base)
    return callable(value) if base is Callable else True


def _matches_rules(value: Any, kind: Any, rules: Sequence[Rule]) -> bool:
    is_any_real = kind is float and is_real(value)
    return (is_any_real or matches(value, kind)) and all(rule.accepts(value) for rule in rules)


def _is_sequence(value: Any) -> bool:
    return (
        hasattr(value, "__getitem__") and hasattr(value, "__len__") and not isinstance(value, str | Mapping)
    )


def _elements_match(values: Any, kind: type, args: tuple[Any, ...]) -> bool:
    if kind is list or args[1:] == (...,):  # all elements have the same type
        return all(matches(value, arg) for value in values for arg in args[:1])
    return not args or (len(values) == len(args) and all(map(matches, values, args)))


def describe_with_article(annotation: Any) -> str:
    """Describe the annotation with an article, such as `an int or None`, for use after `must be`."""
    text = describe(annotation)
    if text.startswith(("'", "None", "a ")) or not text[0].isalpha():
        return text
    return f"{'an' if text[0].lower() in 'aeiou' else 'a'} {text}"


def describe(annotation: Any) -> str:
    """Describe the annotation for an error message: `int`, `str or None`, `'a' or 'b'`, `list[int]`."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        rules = [rule.text for rule in args[1:] if isinstance(rule, Rule)]
        return " ".join([args[0].__name__ if rules else describe(args[0]), *rules])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args)
    if origin is typing.Literal:
        return " or ".join(repr(arg) for arg in args)
    if annotation is type(None) or annotation is None:
        return "None"
    if annotation is float:
        return "finite float"
    base = origin or annotation
    name = str(_TYPE_NAMES.get(base) or getattr(base, "__name__", annotation))
    if origin in (*_BUILTIN_TYPES, Sequence):
        return f"{name}[{', '.join('...' if arg is ... else describe(arg) for arg in args)}]"
    return name


def short_repr(value: Any) -> str:
    """Return the `repr` of `value` for an error message, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
