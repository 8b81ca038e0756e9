"""Limits on configuration files, so that a malicious file cannot hang the process or exhaust its memory."""

from __future__ import annotations

from typing import Any

from slipstream.errors import ConfigError

__all__ = ["MAX_COPIES", "MAX_DEPTH", "check_depth"]

MAX_DEPTH = 100
"""Maximum nesting depth of dicts and lists."""
MAX_COPIES = 100_000
"""Maximum number of values that all aliases (`*name`) in a YAML file may expand to.

The same limit applies to the values and characters that the `_base_` placeholders in a file expand to.
"""


def check_depth(tree: Any, source: str) -> None:
    """Check that dicts and lists are not nested deeper than `MAX_DEPTH`.

    Raises:
        ConfigError: the values are nested too deeply, or a value contains itself; the message names `source`.
    """
    level = [tree]
    for _ in range(MAX_DEPTH + 1):
        level = list({id(item): item for value in level for item in _containers(value)}.values())
        if not level:
            return
    raise ConfigError(
        f"{source}: the values contain a cycle or are nested too deeply; the limit is {MAX_DEPTH} levels"
    )


def _containers(value: Any) -> list[Any]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [item for item in items if isinstance(item, dict | list | tuple)]
