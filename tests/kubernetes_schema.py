"""Validate Kubernetes objects as `kubectl create --validate=strict` does.

Only the rules that the schemas use are implemented.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

_FOLDER = Path(__file__).parent
_SCHEMAS = {"TrainJob": "trainjob_schema.yaml"}
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
    "minimum",
    "minLength",
    "maxLength",
    "maxItems",
}


def faults(job: Any) -> list[str]:
    """Return the fields of a TrainJob that the API server would reject, with the reasons."""
    schema = yaml.safe_load((_FOLDER / _SCHEMAS[job["kind"]]).read_text())
    return list(_faults(job, schema, ""))


def _faults(value: Any, schema: Mapping[str, Any], at: str) -> Iterator[str]:
    unknown = {key for key in schema if not key.startswith("x-kubernetes")} - _KNOWN
    assert not unknown, f"the schema uses rules that are not implemented: {unknown}"
    kind = _TYPES.get(schema.get("type", ""), object)
    allowed = (int, str) if schema.get("x-kubernetes-int-or-string") else kind
    if not isinstance(value, allowed) or (isinstance(value, bool) and allowed is not bool):
        yield f"{at}: {value!r} is not of type {schema.get('type', 'integer or string')}"
        return
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{at}: {value!r} does not match {schema['pattern']}"
    yield from _size_faults(value, schema, at)
    if isinstance(value, dict):
        yield from (f"{at}.{name}: missing" for name in schema.get("required", ()) if name not in value)
        for name, item in value.items():
            yield from _field_faults(name, item, schema, f"{at}.{name}")
    if isinstance(value, list) and "items" in schema:
        for position, item in enumerate(value):
            yield from _faults(item, schema["items"], f"{at}[{position}]")


def _size_faults(value: Any, schema: Mapping[str, Any], at: str) -> Iterator[str]:
    if isinstance(value, int) and value < schema.get("minimum", value):
        yield f"{at}: {value} is less than {schema['minimum']}"
    if isinstance(value, (str, list)):
        longest = schema.get("maxLength" if isinstance(value, str) else "maxItems", len(value))
        if not schema.get("minLength", 0) <= len(value) <= longest:
            yield f"{at}: the length {len(value)} is not allowed"


def _field_faults(name: str, item: Any, schema: Mapping[str, Any], at: str) -> Iterator[str]:
    if name in schema.get("properties", {}):
        yield from _faults(item, schema["properties"][name], at)
    elif "additionalProperties" in schema:
        yield from _faults(item, schema["additionalProperties"], at)
    elif "properties" in schema:
        yield f"{at}: unknown field"
