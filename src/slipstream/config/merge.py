"""Merge configurations."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from slipstream.errors import ConfigError

DELETE = "_delete_"


def merge(
    base: Mapping[Any, Any], override: Mapping[Any, Any], *, list_keys: bool = False, path: str = ""
) -> dict[Any, Any]:
    """Return `base` with the values of `override` merged into it; the arguments are not modified.

    Dicts are merged recursively; other values are replaced. A dict with `_delete_=True` replaces the value in
    `base`; the result does not contain `_delete_`. A dict also replaces a value of None.

    Args:
        base: the mapping with the lower priority.
        override: the mapping with the higher priority.
        list_keys: if a dict is merged into a list, treat the keys of the dict as list indices.
        path: config path of both mappings, for error messages.

    Raises:
        ConfigError: a dict and a value of a different type cannot be merged, or a list item does not exist.
    """
    if override.get(DELETE):
        return dict(_clean(override))
    merged = dict(base)
    for key, value in override.items():
        if key != DELETE:
            merged[key] = _merge_value(merged.get(key), value, list_keys, join(path, key))
    return merged


def _merge_value(old: Any, new: Any, list_keys: bool, path: str) -> Any:
    if not isinstance(new, dict) or old is None or new.get(DELETE):
        return _clean(new)
    if isinstance(old, dict):
        return merge(old, new, list_keys=list_keys, path=path)
    if list_keys and isinstance(old, list | tuple):
        return _merge_items(old, new, path)
    raise ConfigError(
        f"a dict cannot be merged into {reprlib.repr(old)}; add _delete_=True to the dict to replace the value",
        path,
    )


def _merge_items(old: list[Any] | tuple[Any, ...], new: Mapping[Any, Any], path: str) -> Any:
    items = list(old)
    for key, value in new.items():
        if not (str(key).isdecimal() and int(key) < len(items)):
            raise ConfigError(f"the list has no item '{key}'; its length is {len(items)}", path)
        items[int(key)] = _merge_value(items[int(key)], value, True, join(path, key))
    return tuple(items) if isinstance(old, tuple) else items


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items() if key != DELETE}
    if type(value) in (list, tuple):
        return type(value)(_clean(item) for item in value)
    return value


def nest(key: str, value: Any) -> dict[str, Any]:
    """Return `{"a": {"b": value}}` for the key `"a.b"`."""
    first, *rest = key.split(".")
    for segment in reversed(rest):
        value = {segment: value}
    return {first: value}


def join(path: str, key: Any) -> str:
    """Return `path.key`, or `key` if `path` is empty."""
    return f"{path}.{key}" if path else str(key)


def dotted_keys(tree: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted keys of all values in `tree`; list indices count as keys."""
    items: Any = ()
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    for key, value in items:
        yield join(path, key)
        yield from dotted_keys(value, join(path, key))
