"""Parse the value of an override (`1`, `true`, `[1, 2]`, `(1, 2)`, `{a: 1}`) without evaluating it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from slipstream.errors import ConfigError

__all__ = ["parse_value"]

_QUOTED = re.compile(r"""'(?:[^']|'')*'|"(?:[^"\\]|\\.)*\"""")
_CLOSING = {"[": "]", "(": ")", "{": "}"}


def parse_value(text: str) -> Any:
    """Return the typed value of `text`, following the rules of YAML scalars and flow collections.

    Additions to YAML: `(1, 2)` is a tuple, `none` and `None` are None, and `1,2` is the list `[1, 2]`.
    The text is parsed and never evaluated.

    Raises:
        ConfigError: brackets or quotes do not match.
    """
    text = text.strip()
    if not text:
        return ""
    if text[0] in "[({'\"":
        reader = _Reader(text)
        value = reader.value("")
        if reader.at_end():
            return value
        return (
            reader.fail("',' or end of input") if reader.peek() != "," else _Reader(f"[{text}]").parse_all()
        )
    if "," in text and not re.search(r"""[\[\](){}'"]""", text):
        return _Reader(f"[{text}]").parse_all()
    return _scalar(text)


def _scalar(text: str) -> Any:
    from slipstream.config.yaml_format import scalar

    return None if text in ("none", "None") else scalar(text)


class _Reader:
    """A recursive descent parser for a single string."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0

    def parse_all(self) -> Any:
        value = self.value("")
        return value if self.at_end() else self.fail("end of input")

    def peek(self) -> str:
        while self._text[self._position : self._position + 1].isspace():
            self._position += 1
        return self._text[self._position : self._position + 1]

    def at_end(self) -> bool:
        return not self.peek()

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
                self.fail(f"',' or '{closing}'")
        self._position += 1
        return items

    def _pair(self) -> tuple[Any, Any]:
        key = self._atom(":,}")
        if self.peek() != ":":
            self.fail("':'")
        self._position += 1
        return key, self.value(",}")

    def _atom(self, stop: str) -> Any:
        if self.peek() in ("'", '"'):
            quoted = _QUOTED.match(self._text, self._position)
            if quoted is None:
                return self.fail("a closing quote")
            self._position = quoted.end()
            return self._unquote(quoted[0])
        start = self._position
        while self._position < len(self._text) and self._text[self._position] not in stop + "[](){}":
            self._position += 1
        text = self._text[start : self._position].strip()
        return _scalar(text) if text else self.fail("a value")

    def _unquote(self, quoted: str) -> str:
        if quoted[0] == "'":
            return quoted[1:-1].replace("''", "'")
        try:
            return str(json.loads(quoted, strict=False))
        except ValueError:
            return str(self.fail("a valid JSON escape sequence (write a backslash as \\\\)"))

    def fail(self, expected: str) -> Any:
        raise ConfigError(
            f"cannot parse {self._text!r}: expected {expected} at position {self._position + 1}; "
            "put quotes around strings that contain brackets, quotes or commas"
        )
