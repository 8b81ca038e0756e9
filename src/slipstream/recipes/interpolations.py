"""Limit the interpolations (`${key}`) in recipes, because a few short values can expand to billions of references."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from slipstream.errors import ConfigError

__all__ = ["check_interpolations"]

_MAX_REFERENCES = 10_000
_KEY = re.compile(r"[\w-]+(?:[.\[]+[\w-]+\]?)*")
_Key = tuple[Any, ...]


def check_interpolations(tree: Mapping[str, Any], source: str) -> None:
    """Check that OmegaConf reads at most 10,000 additional values to resolve all interpolations in `tree`.

    Every key inside an interpolation counts, even in a resolver's arguments (`${oc.select:key}`).

    Raises:
        ConfigError: if OmegaConf would read more values. The message names `source` and the key.
    """
    costs: dict[_Key, int] = {}

    def cost(key: _Key, node: Any) -> int:
        if key not in costs:
            costs[key] = 0  # OmegaConf raises an error for values that refer to themselves
            total = 1
            for inner, value in _children(key, node):
                total += cost(inner, value)
            for inner in _references(tree, key, node):
                total += cost(inner, _find(tree, inner))
            if total > limit:
                raise ConfigError(
                    f"the interpolations refer to more than {_MAX_REFERENCES:,} values; simplify them ({source})",
                    ".".join(map(str, key)),
                )
            costs[key] = total
        return costs[key]

    try:
        limit = _MAX_REFERENCES + _count_values(tree)
        cost((), tree)
    except RecursionError:
        raise ConfigError(f"{source}: the interpolations are nested too deeply; simplify them") from None


def _count_values(node: Any) -> int:
    return 1 + sum(_count_values(value) for _, value in _children((), node))


def _children(key: _Key, node: Any) -> Iterator[tuple[_Key, Any]]:
    items: Any = (
        node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    )
    for name, value in items:
        yield (*key, name), value


def _references(tree: Any, key: _Key, text: Any) -> Iterator[_Key]:
    """Yield the keys that interpolations in `text` can refer to, resolved against the root or a parent of `key`."""
    if not isinstance(text, str) or not ("${" in text or _KEY.fullmatch(text)):
        return
    for word in _KEY.findall(text.partition("${")[2] or text):
        parts = tuple(filter(None, re.split(r"[.\[\]]+", word)))
        for depth in range(len(key)):
            found = (*key[:depth], *parts)
            if found != key and _find(tree, found) is not None:
                yield found


def _find(tree: Any, key: _Key) -> Any:
    for part in key:
        if isinstance(tree, Mapping):
            tree = tree.get(part, tree.get(int(part)) if str(part).isdecimal() else None)
        elif isinstance(tree, list) and str(part).isdecimal() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            return None
    return tree
