"""Overrides from the command line: `optim_wrapper.optimizer.lr=0.1`."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import Any

from slipstream.config.flow import parse_value
from slipstream.config.merge import DELETE, dotted_keys
from slipstream.errors import ConfigError, UnknownNameError

__all__ = ["check_override", "parse_override"]


def parse_override(text: str) -> tuple[str, Any]:
    """Return the dotted key and the typed value of `"key=value"`; nothing is evaluated.

    The value is typed as a YAML scalar or flow collection: `1` is an int, `1e-3` a float, `true` and
    `True` are bools, `none`, `None` and `null` are None, `[1, 2]` is a list, `(1, 2)` a tuple, `{a: 1}` a
    dict, `'1'` a string; `1,2` is the list `[1, 2]`, as in MMEngine. Everything else is a string.

    Raises:
        ConfigError: there is no `=`, the key has an empty part, or brackets and quotes do not match.
    """
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise ConfigError(f"an override is written key=value or key.subkey=value, not '{text}'")
    try:
        return key, parse_value(value)
    except ValueError as error:  # a ConfigError, or Python's own for integers of thousands of digits
        raise ConfigError(str(error), key) from None
    except RecursionError:
        raise ConfigError("the value has too many brackets inside one another", key) from None


def check_override(tree: dict[str, Any], key: str, known: Iterable[str], source: str) -> None:
    """Check that the dotted `key` names something that `tree` has, or that a part of it may have.

    The first segment must stand in `tree` or in `known`. Every other must exist too, unless the dict it
    goes into has a `type`, is empty or absent, or stands in `known` as `place.*`: then whoever builds that
    part checks it.

    Raises:
        UnknownNameError: it does not; the message names the nearest valid key in the configuration.
        ConfigError: the key leads into a value that has no keys.
    """
    known = set(known)
    node: Any = tree
    segments = key.split(".")
    for depth, segment in enumerate(segments):
        place = ".".join(segments[:depth])
        if depth and (node is None or node == {}):
            return
        if isinstance(node, list | tuple):
            if not (segment.isdecimal() and int(segment) < len(node)):
                raise UnknownNameError(
                    f"'{place}' in {source} is a list of {len(node)}, without '{segment}'", key
                )
            node = node[int(segment)]
        elif not isinstance(node, dict):
            raise ConfigError(f"'{place}' in {source} is {reprlib.repr(node)}, which has no keys", key)
        elif segment in node:
            node = node[segment]
        elif segment in known if depth == 0 else "type" in node or segment == DELETE or f"{place}.*" in known:
            return
        else:
            inside = f"'{place}' of {source}" if depth else source
            raise UnknownNameError(f"no such key in {inside}{_nearest(key, tree, known)}", key)


def _nearest(key: str, tree: dict[str, Any], known: set[str]) -> str:
    """Return `"; did you mean 'x'?"` for the dotted key nearest to `key`, whole or by its last segments."""
    length = key.count(".") + 1

    def likeness(candidate: str) -> tuple[float, float, str]:
        tail = ".".join(candidate.split(".")[-length:])
        whole = SequenceMatcher(None, key, candidate).ratio()
        return max(whole, SequenceMatcher(None, key, tail).ratio()), whole, candidate

    best = max(map(likeness, {*dotted_keys(tree), *known}), default=(0.0, 0.0, ""))
    return f"; did you mean '{best[2]}'?" if best[0] >= 0.5 else ""
