"""Build typed options (dataclasses) from a configuration dict."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

from slipstream.config.merge import join
from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.typecheck import describe_with_article, matches, short_repr

__all__ = ["REMOVED", "optional", "options"]

T = TypeVar("T")

REMOVED: dict[str, str] = {
    "dataloader.stall_warning": "stall_warning no longer exists; set timeout to end a run that waits for a batch",
    "compile.background": "training waits for each compilation, whose code is cached",
    "compile.budget": "compile a smaller scope, such as compile='block', or a part of the model with compile.blocks",
    "compile.wait": "training always waits for compilations",
    "parallel.min_params": "list the classes of the blocks in parallel.wrap",
    "nan_guard.locate": "check the outputs with forward hooks, or use torch.autograd.set_detect_anomaly(True)",
    "nan_guard.max_rollbacks": "use nan_guard='skip', or 'stop' and restart the run with resume=True",
    "nan_guard.skip_before": "use nan_guard='skip', or 'stop' and restart the run with resume=True",
}
"""Options that no longer exist, keyed by the end of their config path: a sentence that names the replacement."""


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
            raise _unknown(join(path, key), fields)
        values[key] = _field(hints[key], value, join(path, key))
    missing = dataclasses.MISSING
    for name, field in fields.items():
        if name not in values and field.default is missing and field.default_factory is missing:
            raise ConfigError(
                f"the required key is missing; its value must be {describe_with_article(hints[name])}",
                join(path, name),
            )
    return _construct(cls, values, path)


def optional(cls: type[T], value: Any, path: str) -> T | None:
    """Return None if `value` is None or False, the defaults if it is True, and otherwise the result of `options`."""
    if value is None or value is False:
        return None
    return options(cls, {} if value is True else value, path)


def _unknown(path: str, fields: Iterable[str]) -> UnknownNameError:
    for removed, remedy in REMOVED.items():
        if f".{path}".endswith(f".{removed}"):
            return UnknownNameError(f"this option was removed; {remedy}", path)
    return UnknownNameError(f"no such option{did_you_mean(path.rpartition('.')[2], fields)}", path)


def _field(annotation: Any, value: Any, path: str) -> Any:
    """Check `value` against the annotation of its field, and return the value of the field."""
    kind = typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    members = typing.get_args(kind) if union else (kind,)
    nested = [m for m in members if isinstance(m, type) and dataclasses.is_dataclass(m)]
    if not nested:
        fits = matches(value, annotation)
    elif isinstance(value, Mapping) or (value is None and not union):
        return options(nested[0], value, path)
    else:
        # `matches` accepts any value for a dataclass, so check each member of the union.
        fits = any(isinstance(value, m) if m in nested else matches(value, m) for m in members)
    if not fits:
        raise ConfigError(f"must be {describe_with_article(annotation)}, not {short_repr(value)}", path)
    return value


def _construct(cls: type[T], values: dict[str, Any], path: str) -> T:
    try:
        return cls(**values)
    except ConfigError as error:
        error.path = join(path, error.path) if error.path else path
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error), path) from error
