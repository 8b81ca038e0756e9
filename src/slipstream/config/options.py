"""Build typed options (dataclasses) from a configuration dict, and add its paths to errors."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeVar

from slipstream.config.merge import join
from slipstream.errors import ConfigError, UnknownNameError, did_you_mean, locate
from slipstream.typecheck import describe_with_article, matches, short_repr

T = TypeVar("T")


def options(cls: type[T], mapping: Any, path: str) -> T:
    """Build an instance of the dataclass `cls` from the values in `mapping`.

    Fields whose annotation is a dataclass (or a union that contains a dataclass) are built from nested mappings.

    Args:
        cls: a dataclass, usually frozen.
        mapping: the values by field name. An instance of `cls` is returned unchanged; None selects the defaults.
        path: config path of the mapping, for error messages.

    Raises:
        UnknownNameError: a key is not a field; the message suggests the nearest field.
        ConfigError: a value does not match the annotation, a field without a default is missing, or `cls`
            rejects the values.
    """
    if isinstance(mapping, cls):
        return mapping
    if mapping is not None and not isinstance(mapping, Mapping):
        raise ConfigError(
            f"must be a dict with the fields of {cls.__name__}, not {short_repr(mapping)}", path
        )
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls, include_extras=True)
    values = {}
    for key, value in (mapping or {}).items():
        if key not in fields:
            raise UnknownNameError(
                f"no such option{did_you_mean(key, fields, join(path, key))}", join(path, key)
            )
        values[key] = read_value(hints[key], value, join(path, key))
    missing = dataclasses.MISSING
    for name, field in fields.items():
        if name not in values and field.default is missing and field.default_factory is missing:
            raise ConfigError(
                f"the required key is missing; its value must be {describe_with_article(hints[name])}",
                join(path, name),
            )
    try:
        return cls(**values)
    except ConfigError as error:
        error.path = join(path, error.path) if error.path else path
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error), path) from error


def read_value(annotation: Any, value: Any, path: str) -> Any:
    """Return the value of a field with this annotation, which is built from a dict if the annotation is a dataclass.

    For a dataclass, True selects the defaults, and a str, a number or a list sets the field that the class attribute
    `shorthand` names. `Annotated` may contain a function that reads the value instead.

    Raises:
        ConfigError: the value does not match the annotation.
    """
    annotated = typing.get_args(annotation) if typing.get_origin(annotation) is Annotated else (annotation,)
    if isinstance(annotated[-1], types.FunctionType):
        return annotated[-1](value)
    kind = annotated[0]
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    members = typing.get_args(kind) if union else (kind,)
    nested = [m for m in members if isinstance(m, type) and dataclasses.is_dataclass(m)]
    if nested and value is True and bool not in members:
        value = {}
    elif nested and hasattr(nested[0], "shorthand") and isinstance(value, str | float | int | list):
        value = {nested[0].shorthand: value}
    if not nested:
        fits = matches(value, annotation)
    elif isinstance(value, Mapping) or (value is None and not union):
        return options(nested[0], value, path)
    else:
        # `matches` accepts any value for a dataclass, so check each member of the union.
        fits = any(isinstance(value, m) if m in nested else matches(value, m) for m in members)
        if not fits and union and {*members} <= {*nested, type(None)}:
            return options(nested[0], value, path)  # raises an error
    if not fits:
        names = [name for m in members if typing.get_origin(m) is Literal for name in typing.get_args(m)]
        hint = did_you_mean(value, names, f"{path}={value}") if isinstance(value, str) and names else ""
        raise ConfigError(f"must be {describe_with_article(annotation)}, not {short_repr(value)}{hint}", path)
    return value


@contextmanager
def add_config_path(user_cfg: Mapping[str, Any], default: str = "") -> Iterator[None]:
    """Prefix the path of each `ConfigError` with the path of its `source` dict in `user_cfg`, or with `default`."""
    try:
        yield
    except ConfigError as error:
        source = error.source
        path = ("" if source is None else locate(source, user_cfg) or "").lstrip(".") or default
        if path:
            dot = "" if not error.path or error.path.startswith("[") else "."
            error.path = path + dot + error.path
            error.source = None  # an outer block must not prefix it again
        raise
