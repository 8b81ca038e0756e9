"""Command-line overrides such as `optim_wrapper.optimizer.lr=0.1`."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from typing import Any

from slipstream.config.flow import parse_value
from slipstream.config.merge import DELETE, dotted_keys
from slipstream.errors import ConfigError, UnknownNameError

__all__ = ["check_override", "parse_override"]

_MIN_SIMILARITY = 0.6
"""Minimum similarity of a suggestion, as in `difflib.get_close_matches`."""


def parse_override(text: str) -> tuple[str, Any]:
    """Return the dotted key and the typed value of `"key=value"`. The text is parsed and never evaluated.

    The value is parsed as a YAML scalar or flow collection: `1` is an int, `1e-3` is a float, `true` and `True` are
    bools, `none`, `None` and `null` are None, `[1, 2]` is a list, `(1, 2)` is a tuple, `{a: 1}` is a dict, and `'1'` is
    a string. As in MMEngine, `1,2` is the list `[1, 2]`. Anything else is a string.

    Raises:
        ConfigError: there is no `=`, a segment of the key is empty, or brackets or quotes do not match.
    """
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise ConfigError(f"an override must be key=value or key.subkey=value, got '{text}'")
    try:
        return key, parse_value(value)
    except ValueError as error:  # a ConfigError, or Python's error for integers with thousands of digits
        raise ConfigError(str(error), key) from None
    except RecursionError:
        raise ConfigError("the brackets in the value are nested too deeply", key) from None


def check_override(
    tree: dict[str, Any],
    key: str,
    known: Iterable[str],
    source: str,
    hints: Mapping[str, str] | None = None,
) -> None:
    """Check that the dotted `key` exists in `tree` or may be added to it.

    Each segment must exist in `tree`, or its dotted path must be in `known`, unless its parent dict has a `type`, is
    empty or absent, or is in `known` as `parent.*`. In these cases, the builder checks the key later.

    Raises:
        UnknownNameError: the key is unknown; the message suggests the nearest valid key in the configuration.
        ConfigError: a segment follows a value that has no keys.
    """
    known = set(known)
    node: Any = tree
    segments = key.split(".")
    for depth, segment in enumerate(segments):
        parent = ".".join(segments[:depth])
        if depth and (node is None or node == {}):
            return
        if isinstance(node, list | tuple):
            if not (segment.isdecimal() and int(segment) < len(node)):
                raise UnknownNameError(
                    f"the list '{parent}' in {source} has no item '{segment}'; its length is {len(node)}",
                    key,
                )
            node = node[int(segment)]
        elif not isinstance(node, dict):
            raise ConfigError(f"'{parent}' in {source} is {reprlib.repr(node)}, which has no keys", key)
        elif segment in node:
            node = node[segment]
        elif ".".join(segments[: depth + 1]) in known or (depth and _is_open(node, parent, segment, known)):
            return
        else:
            location = f"'{parent}' of {source}" if depth else source
            raise UnknownNameError(
                f"no such key in {location}{_suggestion(key, tree, known, hints or {})}", key
            )


def _is_open(node: dict[str, Any], parent: str, segment: str, known: set[str]) -> bool:
    """Return whether `segment` may be added to `node`, the dict at the dotted key `parent`."""
    return "type" in node or segment == DELETE or f"{parent}.*" in known


def _suggestion(key: str, tree: dict[str, Any], known: set[str], hints: Mapping[str, str]) -> str:
    """Return `"; did you mean 'x'?"` for the dotted key whose full path or last segments are most similar to `key`.

    If this key is in `hints`, the value from `hints` is suggested instead. If the last segments of several keys are
    equally similar, the key with the most similar full path is suggested. If no key is similar enough, the result is an
    empty string.
    """
    length = key.count(".") + 1

    def similarity(candidate: str) -> tuple[float, float, str]:
        tail = ".".join(candidate.split(".")[-length:])
        full = SequenceMatcher(None, key, candidate).ratio()
        return max(full, SequenceMatcher(None, key, tail).ratio()), full, candidate

    best = max(map(similarity, {*dotted_keys(tree), *known, *hints}), default=(0.0, 0.0, ""))
    return f"; did you mean '{hints.get(best[2], best[2])}'?" if best[0] >= _MIN_SIMILARITY else ""
