"""Placeholders `{{ ... }}` in configuration files: file names, values from bases, and environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.config.config_dict import unwrap
from slipstream.config.merge import dotted_keys
from slipstream.config.override import parse_value
from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.redaction import is_secret_name

_PATTERN = re.compile(
    r"\{\{[ \t]*(?:"
    r"(?P<file>fileDirname|fileBasename|fileBasenameNoExtension|fileExtname)"
    r"|_base_\.(?P<base>[^\s{}]+)"
    r"|\$(?P<env>\w+)(?::(?P<default>[^{}\n]*+))?"  # *+ does not backtrack, so the search takes linear time
    r")[ \t]*+\}\}"
)
_TOKEN = re.compile(r"_slipstream_placeholder_\d+_")


class Placeholders:
    """The placeholders of one file.

    `text` is the source with each placeholder replaced by a name, which is valid in every format; `fill` replaces
    these names in the parsed values. If a placeholder is the entire value, the result can have any type: a base value
    is copied, and an environment variable outside quotes is parsed like an override.

    Args:
        source: the text of the file.
        path: the path of the file.
        quote: whether placeholders outside strings need quotes, as in formats without unquoted strings (JSON, TOML).
    """

    def __init__(self, source: str, path: Path, *, quote: bool) -> None:
        self.bases: Mapping[str, Any] = {}
        self._path, self._quote = path, quote
        self._matches: dict[str, re.Match[str]] = {}
        self.text = _PATTERN.sub(self._token, source)

    def _token(self, match: re.Match[str]) -> str:
        token = f"_slipstream_placeholder_{len(self._matches)}_"
        self._matches[token] = match
        before, after = match.string[: match.start()].rstrip(), match.string[match.end() :].lstrip()
        is_value = before[-1:] in ("", *":=[,") and after[:1] not in ("'", '"')
        return f'"{token}"' if self._quote and is_value else token

    def __contains__(self, token: str) -> bool:
        return token in self._matches

    def fill(self, value: Any) -> Any:
        """Return `value` with all placeholders replaced, including those in dict keys.

        Raises:
            ConfigError: no base has the key, or the environment variable is not set and has no default.
        """
        if isinstance(value, dict):
            return {self.fill(key): self.fill(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.fill(item) for item in value]
        if not isinstance(value, str):
            return value
        if value not in self._matches:
            return _TOKEN.sub(lambda token: str(self._look_up(self._matches[token[0]])), value)
        match = self._matches[value]
        result = self._look_up(match)
        # A secret such as 0123e45 must not be parsed as a number.
        is_text = not match["env"] or _in_quotes(match) or is_secret_name(match["env"])
        return result if is_text else parse_value(result)

    def _look_up(self, match: re.Match[str]) -> Any:
        if match["file"]:
            return {
                "fileDirname": self._path.parent.resolve().as_posix(),
                "fileBasename": self._path.name,
                "fileBasenameNoExtension": self._path.stem,
                "fileExtname": self._path.suffix,
            }[match["file"]]
        if match["base"]:
            return self._base_value(match)
        name, default = match["env"], match["default"]
        if name not in os.environ and default is None:
            raise ConfigError(
                f"{self._location(match)}: the environment variable {name} is not set; "
                f"set it, or add a default: {{{{${name}:default}}}}"
            )
        return os.environ.get(name, (default or "").rstrip(" \t"))

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
        return unwrap(value)

    def _location(self, match: re.Match[str]) -> str:
        return f"{self._path}:{match.string.count(chr(10), 0, match.start()) + 1}"


def _in_quotes(match: re.Match[str]) -> bool:
    before, after = match.string[: match.start()][-1:], match.string[match.end() :][:1]
    return before == after and before in ("'", '"')


def has_references(value: Any) -> bool:
    """Return whether a dumped configuration refers to environment variables (`{{ $NAME }}`)."""
    if isinstance(value, Mapping):
        return any(map(has_references, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_references, value))
    return isinstance(value, str) and any(match["env"] for match in _PATTERN.finditer(value))
