"""Command-line overrides such as `optim_wrapper.optimizer.lr=0.1`, which are parsed and never evaluated."""

from __future__ import annotations

import argparse
import json
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from slipstream.config.merge import DELETE, dotted_keys
from slipstream.errors import ConfigError, UnknownNameError, did_you_mean

_QUOTED = re.compile(r"""'(?:[^']|'')*'|"(?:[^"\\]|\\.)*\"""")
_CLOSING = {"[": "]", "(": ")", "{": "}"}


class DictAction(argparse.Action):
    """Collect `--cfg-options key=value key.subkey=value ...` into a dict that maps dotted keys to typed values.

    `Config.merge_from_dict` accepts this dict. See `parse_override` for the supported value types. The option can be
    repeated.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Add the overrides from one occurrence of the option to `namespace`."""
        texts = [values] if isinstance(values, str) else values or []
        try:
            parsed = dict(parse_override(text) for text in texts)
        except ConfigError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        setattr(namespace, self.dest, {**(getattr(namespace, self.dest, None) or {}), **parsed})


def parse_override(text: str) -> tuple[str, Any]:
    """Return the dotted key and the typed value of `"key=value"`; see `parse_value`.

    Raises:
        ConfigError: there is no `=`, a segment of the key is empty, or brackets or quotes do not match.
    """
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise ConfigError(f"an override must be key=value or key.subkey=value, got '{text}'")
    try:
        return key, parse_value(value)
    except ConfigError as error:
        raise ConfigError(str(error), key) from None


def parse_value(text: str) -> Any:
    """Return the typed value of `text`, following the rules of YAML scalars and flow collections.

    `1` is an int, `1e-3` is a float, `true` and `True` are bools, `none`, `None` and `null` are None, `[1, 2]` is a
    list, `(1, 2)` is a tuple, `{a: 1}` is a dict, and `'1'` is a string. As in MMEngine, `1,2` is the list `[1, 2]`.
    Anything else is a string.

    Raises:
        ConfigError: brackets or quotes do not match.
    """
    text = text.strip()
    if not text:
        return ""
    if text[0] in "[({'\"":
        reader = _Reader(text)
        value = reader.value("")
        if reader.peek() != ",":
            return reader.end(value)
    elif "," not in text or re.search(r"""[\[\](){}'"]""", text):
        return _scalar(text)
    reader = _Reader(f"[{text}]")
    return reader.end(reader.value(""))


def _scalar(text: str) -> Any:
    from slipstream.config.yaml_format import scalar

    return None if text in ("none", "None") else scalar(text)


class _Reader:
    """A recursive descent parser for a single string."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0

    def peek(self) -> str:
        while self._text[self._position : self._position + 1].isspace():
            self._position += 1
        return self._text[self._position : self._position + 1]

    def end(self, value: Any) -> Any:
        return self._fail("end of input") if self.peek() else value

    def value(self, stop: str) -> Any:
        first = self.peek()
        if first == "[":
            return self._items(lambda: self.value(",]"))
        if first == "(":
            return tuple(self._items(lambda: self.value(",)")))
        if first == "{":
            return dict(self._items(self._pair))
        return self._atom(stop)

    def _items(self, read: Callable[[], Any]) -> list[Any]:
        closing = _CLOSING[self.peek()]
        self._position += 1
        items = []
        while self.peek() != closing:
            items.append(read())
            if self.peek() == ",":
                self._position += 1
            elif self.peek() != closing:
                self._fail(f"',' or '{closing}'")
        self._position += 1
        return items

    def _pair(self) -> tuple[Any, Any]:
        key = self._atom(":,}")
        if self.peek() != ":":
            self._fail("':'")
        self._position += 1
        return key, self.value(",}")

    def _atom(self, stop: str) -> Any:
        if self.peek() in ("'", '"'):
            quoted = _QUOTED.match(self._text, self._position)
            if quoted is None:
                return self._fail("a closing quote")
            self._position = quoted.end()
            return quoted[0][1:-1].replace("''", "'") if quoted[0][0] == "'" else self._unescape(quoted[0])
        start = self._position
        while self._position < len(self._text) and self._text[self._position] not in stop + "[](){}":
            self._position += 1
        text = self._text[start : self._position].strip()
        return _scalar(text) if text else self._fail("a value")

    def _unescape(self, quoted: str) -> str:
        try:
            return str(json.loads(quoted, strict=False))
        except ValueError:
            return str(self._fail("a valid JSON escape sequence (write a backslash as \\\\)"))

    def _fail(self, expected: str) -> Any:
        raise ConfigError(
            f"cannot parse {self._text!r}: expected {expected} at position {self._position + 1}; "
            "put quotes around strings that contain brackets, quotes or commas"
        )


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
    known, hints = set(known), hints or {}
    node: Any = tree
    segments = key.split(".")
    for depth, segment in enumerate(segments):
        parent = ".".join(segments[:depth])
        if depth and (node is None or node == {}):
            return
        if isinstance(node, list | tuple):
            if not (segment.isdecimal() and int(segment) < len(node)):
                raise UnknownNameError(
                    f"the list '{parent}' in {source} has no item '{segment}'; its length is {len(node)}", key
                )
            node = node[int(segment)]
        elif not isinstance(node, dict):
            raise ConfigError(f"'{parent}' in {source} is {reprlib.repr(node)}, which has no keys", key)
        elif segment in node:
            node = node[segment]
        elif (
            ".".join(segments[: depth + 1]) in known
            or f"{parent}.*" in known
            or (depth and ("type" in node or segment == DELETE))
        ):
            return
        else:
            location = f"'{parent}' of {source}" if depth else source
            names = {*dotted_keys(tree), *known, *hints}
            ends = sorted(name for name in names if name.endswith(f".{key}"))
            suggestion = f"; did you mean '{ends[0]}'?" if ends else did_you_mean(key, names)
            for name, replacement in hints.items():
                suggestion = suggestion.replace(f"'{name}'", f"'{replacement}'")
            raise UnknownNameError(f"no such key in {location}{suggestion}", key)
