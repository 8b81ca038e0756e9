"""The JSON schema for recipes. Editors use the schema to complete and check the keys in YAML and JSON files."""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Required, Union, get_args, get_origin, get_type_hints, is_typeddict

from slipstream.config_types import AnyMapping
from slipstream.recipes.find import COMPOSED_KEYS
from slipstream.runner import Runner
from slipstream.training.params import TrainingParams

__all__ = ["recipe_schema"]

_SIMPLE = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
_OBJECTS = {"type": "object"}
_OMITTED = ("cfg", "work_dir")


def recipe_schema() -> dict[str, Any]:
    """Return the schema for both kinds of recipes: those with the Runner's keys, and those in SuperGradients' syntax.

    Dicts defined in `slipstream.config_types` are described in full. Other dicts accept any key, because their keys
    are arguments of classes specified in the recipe.
    """
    hints = _hints(Runner.__init__)
    names = [name for name in inspect.signature(Runner).parameters if name not in _OMITTED]
    params = {
        "type": ["object", "string", "null"],
        "properties": {field.name: {} for field in dataclasses.fields(TrainingParams)},
    }
    composed = {
        "architecture": {"type": "string"},
        "arch_params": _OBJECTS,
        "training_hyperparams": params,
        "training_params": params,
        "dataset_params": _OBJECTS,
        "defaults": {"type": "array"},
    }
    runner = {name: _schema(hints[name]) for name in names}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Slipstream recipe",
        "type": "object",
        "if": {"anyOf": [{"required": [name]} for name in COMPOSED_KEYS]},
        "then": {"properties": composed},
        "else": {"properties": {"work_dir": {"type": "string"}, **runner}},
    }


class _Object(type):
    """Metaclass for names imported only for type checking. Their values are objects, which a file cannot contain."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _Unwritable(metaclass=_Object):
    def __class_getitem__(cls, item: Any) -> Any:
        return cls


class _Names(dict[str, Any]):
    """A namespace for annotations. Names that are neither in it nor builtins evaluate to `_Unwritable`."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, _Unwritable)


def _hints(annotated: Any) -> dict[str, Any]:
    module = vars(sys.modules[annotated.__module__])
    typed = vars(sys.modules["slipstream.config_types"])
    return get_type_hints(annotated, localns=_Names({**typed, **module}))


def _schema(hint: Any) -> dict[str, Any]:
    """Return the schema for a type, or `{"not": {}}`, which accepts no value, if a file cannot contain such values."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any or isinstance(hint, str):
        return {}
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    if origin is Required:
        return _schema(arguments[0])
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return _any_of(arguments)
    if is_typeddict(hint):
        return _typed_dict(hint)
    if hint is AnyMapping or _is(origin or hint, Mapping):
        return _OBJECTS
    if _is(origin or hint, Sequence):
        return {"type": "array"}
    return {"not": {}}


def _is(hint: Any, kind: type) -> bool:
    return isinstance(hint, type) and issubclass(hint, kind)


def _any_of(hints: Sequence[Any]) -> dict[str, Any]:
    """Return the schema for a union.

    If the union contains a dict with known keys, `AnyMapping` is omitted, because it would accept any key.
    """
    if any(is_typeddict(hint) for hint in hints):
        hints = [hint for hint in hints if hint is not AnyMapping]
    options = [schema for hint in hints if (schema := _schema(hint)) != {"not": {}}]
    return (
        {}
        if {} in options
        else {"anyOf": options}
        if len(options) > 1
        else options[0]
        if options
        else {"not": {}}
    )


def _typed_dict(hint: Any) -> dict[str, Any]:
    """Return the schema for a dict. A dict with a `type` key may have other keys, which are arguments of the class."""
    hints = _hints(hint)
    properties = {name: _schema(each) for name, each in hints.items()}
    closed = {} if "type" in hints else {"additionalProperties": False}
    text = (hint.__doc__ or "").strip()
    return {"type": "object", "description": text, "properties": properties, **closed}
