"""Placeholders `{{ ... }}` in configuration files: file names, values from bases, and environment variables."""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.config.config_dict import unwrap
from slipstream.config.flow import parse_value
from slipstream.config.limits import MAX_COPIES
from slipstream.config.merge import dotted_keys
from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.redaction import Reference, is_secret_name

__all__ = ["Placeholders", "has_references"]

_PATTERN = re.compile(
    r"\{\{[ \t]*(?:"
    r"(?P<file>fileDirname|fileBasename|fileBasenameNoExtension|fileExtname)"
    r"|_base_\.(?P<base>[^\s{}]+)"
    r"|\$(?P<env>\w+)(?::(?P<default>[^{}\n]*+))?"  # *+ does not backtrack, so the search takes linear time
    r")[ \t]*+\}\}"
)
# Strings and comments in JSON and TOML. An unterminated string also matches, so the search takes linear time.
_STRING = re.compile(
    r'''"""(?:\\.|[^\\])*?(?:"""|\Z)|'{3}.*?(?:'{3}|\Z)|"(?:\\.|[^"\\\n])*"?|'[^'\n]*'?|\#[^\n]*''', re.DOTALL
)
_TOKEN = re.compile(r"_slipstream_placeholder_\d+_")


class Placeholders:
    """The placeholders of one file.

    `text` is the source with each placeholder replaced by a token, so that the format's parser can read it. `fill`
    replaces the tokens with the values. If a placeholder is the entire value, the result can have any type: a base
    value is copied, and an environment variable outside quotes is parsed like an override. In a longer string, the
    value is converted to a string. Placeholders in comments are ignored. Strings from environment variables are
    returned as `Reference`s.

    Args:
        source: the text of the file.
        path: the path of the file.
        quote: whether tokens outside strings need quotes, as in formats without unquoted strings (JSON, TOML).
    """

    def __init__(self, source: str, path: Path, *, quote: bool) -> None:
        self.bases: Mapping[str, Any] = {}
        self._copies = 0
        self._path = path
        self._matches: dict[str, re.Match[str]] = {}
        in_strings = _positions_in_strings(source) if quote else set()
        self.text = _PATTERN.sub(
            lambda match: self._token(match, quote and match.start() not in in_strings), source
        )

    def _token(self, match: re.Match[str], quote: bool) -> str:
        token = f"_slipstream_placeholder_{len(self._matches)}_"
        self._matches[token] = match
        return f'"{token}"' if quote else token

    def __contains__(self, token: str) -> bool:
        return token in self._matches

    def fill(self, value: Any) -> Any:
        """Return `value` with all tokens replaced, including those in dict keys.

        Raises:
            ConfigError: no base has the key, or the environment variable is not set and has no default.
        """
        if isinstance(value, dict):
            return {self.fill(key): self.fill(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.fill(item) for item in value]
        if not isinstance(value, str):
            return value
        if value in self._matches:
            match = self._matches[value]
            result = self._look_up(match)
            return _parse_env_value(result, match) if match["env"] else result
        return self.fill_text(value)

    def fill_text(self, text: str) -> str:
        """Return `text` with every token replaced by its value, which is converted to a string."""

        def value(token: re.Match[str]) -> Any:
            return self._look_up(self._matches[token[0]])

        def reference(token: re.Match[str]) -> str:
            match, result = self._matches[token[0]], value(token)
            if match["env"] and match["env"] in os.environ:
                return _reference(match)
            return result.reference if isinstance(result, Reference) else str(result)

        filled = _TOKEN.sub(lambda token: str(value(token)), text)
        with_references = _TOKEN.sub(reference, text)
        return filled if with_references == filled else Reference(filled, with_references)

    def _look_up(self, match: re.Match[str]) -> Any:
        if match["file"]:
            return self._file_part(match["file"])
        if match["base"]:
            return self._base_value(match)
        result: str | None = os.environ.get(match["env"], _default(match))
        if result is None:
            name = match["env"]
            raise ConfigError(
                f"{self._location(match)}: the environment variable {name} is not set; "
                f"set it, or add a default: {{{{${name}:default}}}}"
            )
        return result

    def _file_part(self, name: str) -> str:
        if name == "fileDirname":
            return self._path.parent.resolve().as_posix()
        return {
            "fileBasename": self._path.name,
            "fileBasenameNoExtension": self._path.stem,
            "fileExtname": self._path.suffix,
        }[name]

    def _base_value(self, match: re.Match[str]) -> Any:
        value: Any = self.bases
        for key in match["base"].split("."):
            if isinstance(value, Mapping) and key in value:
                value = value[key]
            elif isinstance(value, list | tuple) and key.isdecimal() and int(key) < len(value):
                value = value[int(key)]
            else:
                hint = did_you_mean(match["base"], dotted_keys(self.bases))
                raise UnknownNameError(
                    f"{self._location(match)}: no base has the key '{match['base']}'{hint}"
                )
        self._copies += _size(value)
        if self._copies > MAX_COPIES:
            raise ConfigError(
                f"{self._location(match)}: the `_base_` placeholders expand to more than "
                f"{MAX_COPIES:,} values and characters; use fewer of them"
            )
        return unwrap(value)

    def _location(self, match: re.Match[str]) -> str:
        return f"{self._path}:{match.string.count(chr(10), 0, match.start()) + 1}"


def has_references(value: Any) -> bool:
    """Return whether a dumped configuration refers to environment variables (`{{ $NAME }}`)."""
    if isinstance(value, Mapping):
        return any(map(has_references, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_references, value))
    return isinstance(value, str) and any(match["env"] for match in _PATTERN.finditer(value))


def _size(value: Any) -> int:
    """Return the number of values and characters in nested dicts and lists."""
    if isinstance(value, Mapping):
        return 1 + sum(map(_size, value.values()))
    if isinstance(value, list | tuple):
        return 1 + sum(map(_size, value))
    return 1 + (len(value) if isinstance(value, str) else 0)


def _parse_env_value(text: str, match: re.Match[str]) -> Any:
    """Return the typed value of an environment variable placeholder that is not part of a longer string."""
    name = match["env"]
    # A secret such as 0123e45 must not be parsed as a number.
    as_text = _in_quotes(match) or is_secret_name(name)
    value = text if as_text else parse_value(text)
    if name not in os.environ:  # the default, which is part of the file
        return value
    if isinstance(value, str):
        return Reference(value, _reference(match))
    return value


def _reference(match: re.Match[str]) -> str:
    name, default = match["env"], _default(match)
    secret = default is None or is_secret_name(name)
    return f"{{{{ ${name} }}}}" if secret else f"{{{{ ${name}:{default} }}}}"


def _in_quotes(match: re.Match[str]) -> bool:
    before, after = match.string[: match.start()][-1:], match.string[match.end() :][:1]
    return before == after and before in ("'", '"')


def _positions_in_strings(source: str) -> set[int]:
    """Return the positions of the placeholders inside JSON or TOML strings."""
    positions = [match.start() for match in _PATTERN.finditer(source)]
    masked = _PATTERN.sub(lambda match: "_" * len(match[0]), source) if positions else ""
    inside: set[int] = set()
    for string in _STRING.finditer(masked):
        if string[0][0] != "#":
            inside.update(
                positions[bisect_left(positions, string.start()) : bisect_left(positions, string.end())]
            )
    return inside


def _default(match: re.Match[str]) -> str | None:
    default: str | None = match["default"]
    return None if default is None else default.rstrip(" \t")
