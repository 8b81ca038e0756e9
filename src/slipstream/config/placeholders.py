"""Placeholders `{{ ... }}` of configuration files: file name, values of bases, environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.config.config_dict import unwrap
from slipstream.config.flow import parse_value
from slipstream.config.merge import dotted_keys
from slipstream.errors import ConfigError, UnknownNameError, did_you_mean

__all__ = ["Placeholders"]

_PATTERN = re.compile(
    r"\{\{[ \t]*(?:"
    r"(?P<file>fileDirname|fileBasename|fileBasenameNoExtension|fileExtname)"
    r"|_base_\.(?P<base>[^\s{}]+)"
    r"|\$(?P<env>\w+)(?::(?P<default>[^}\n]*?))?"
    r")[ \t]*\}\}"
)
# Strings and comments of JSON and TOML.
_CLOSED = re.compile(
    r'''"""(?:\\.|[^\\])*?"""|'{3}.*?'{3}|"(?:\\.|[^"\\\n])*"|'[^'\n]*'|\#[^\n]*''', re.DOTALL
)
_TOKEN = re.compile(r"_slipstream_placeholder_\d+_")


class Placeholders:
    """The placeholders of one file.

    `text` is the source with a token in place of each placeholder, so that a parser of the format can read it. `fill`
    replaces the tokens with the values. A placeholder that is a whole value has a type: a base value is copied, and an
    environment variable outside quotes is parsed like an override. A placeholder inside a longer string becomes text.
    Placeholders in comments are ignored.

    Args:
        source: The text of the file.
        path: The path of the file.
        quote: Whether tokens outside strings need quotes, because the format has no bare words (JSON, TOML).
    """

    def __init__(self, source: str, path: Path, *, quote: bool) -> None:
        self.bases: Mapping[str, Any] = {}
        self._path = path
        self._found: dict[str, re.Match[str]] = {}
        self.text = _PATTERN.sub(lambda match: self._token(match, quote), source)

    def _token(self, match: re.Match[str], quote: bool) -> str:
        token = f"_slipstream_placeholder_{len(self._found)}_"
        self._found[token] = match
        return f'"{token}"' if quote and not _inside_string(match) else token

    def __contains__(self, token: str) -> bool:
        return token in self._found

    def fill(self, value: Any) -> Any:
        """Return `value` with all tokens replaced, including those in keys of dicts.

        Raises:
            ConfigError: No base has the key, or the environment variable is not set and has no default.
        """
        if isinstance(value, dict):
            return {self.fill(key): self.fill(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.fill(item) for item in value]
        if not isinstance(value, str):
            return value
        if value in self._found:
            match = self._found[value]
            found = self._look_up(match)
            return parse_value(found) if match["env"] and not _in_quotes(match) else found
        return self.fill_text(value)

    def fill_text(self, text: str) -> str:
        """Return `text` with every token replaced by its value as text."""
        return _TOKEN.sub(lambda token: str(self._look_up(self._found[token[0]])), text)

    def _look_up(self, match: re.Match[str]) -> Any:
        if match["file"]:
            return self._file_part(match["file"])
        if match["base"]:
            return self._base_value(match)
        found: str | None = os.environ.get(match["env"], match["default"])
        if found is None:
            name = match["env"]
            raise ConfigError(
                f"{self._location(match)}: the environment variable {name} is not set; "
                f"set it, or add a default: {{{{${name}:default}}}}"
            )
        return found

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
        return unwrap(value)

    def _location(self, match: re.Match[str]) -> str:
        return f"{self._path}:{match.string.count(chr(10), 0, match.start()) + 1}"


def _in_quotes(match: re.Match[str]) -> bool:
    before, after = match.string[: match.start()][-1:], match.string[match.end() :][:1]
    return before == after and before in ("'", '"')


def _inside_string(match: re.Match[str]) -> bool:
    """Return whether the placeholder is inside a JSON or TOML string."""
    before = _CLOSED.sub("", match.string[: match.start()])
    return "'" in before or '"' in before
