"""Validation of Kubernetes objects: the rules of `kubectl create --validate=strict` that the schema uses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

_SCHEMA = Path(__file__).with_name("pytorchjob_schema.yaml")
_TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
_KNOWN = {
    "type",
    "properties",
    "additionalProperties",
    "items",
    "required",
    "pattern",
    "anyOf",
    "format",
    "default",
}


def faults(job: Any) -> list[str]:
    """Return the fields of a PyTorchJob that the API server rejects, with reasons."""
    return list(_faults(job, yaml.safe_load(_SCHEMA.read_text()), ""))


def _faults(value: Any, schema: Mapping[str, Any], at: str) -> Iterator[str]:
    unknown = {key for key in schema if not key.startswith("x-kubernetes")} - _KNOWN
    assert not unknown, f"the schema uses rules that are not implemented: {unknown}"
    kind = _TYPES.get(schema.get("type", ""), object)
    allowed = (int, str) if schema.get("x-kubernetes-int-or-string") else kind
    if not isinstance(value, allowed) or (isinstance(value, bool) and allowed is not bool):
        yield f"{at}: {value!r} is not {schema.get('type', 'an integer or a string')}"
        return
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{at}: {value!r} does not match {schema['pattern']}"
    if isinstance(value, dict):
        yield from (f"{at}.{name}: missing" for name in schema.get("required", ()) if name not in value)
        for name, item in value.items():
            yield from _field_faults(name, item, schema, f"{at}.{name}")
    if isinstance(value, list) and "items" in schema:
        for position, item in enumerate(value):
            yield from _faults(item, schema["items"], f"{at}[{position}]")


def _field_faults(name: str, item: Any, schema: Mapping[str, Any], at: str) -> Iterator[str]:
    if name in schema.get("properties", {}):
        yield from _faults(item, schema["properties"][name], at)
    elif "additionalProperties" in schema:
        yield from _faults(item, schema["additionalProperties"], at)
    elif "properties" in schema:
        yield f"{at}: unknown field"
