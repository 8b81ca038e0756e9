"""Speed options for scripts that do not use Slipstream directly (`--speed compile=True precision=bf16 ema=True`).

`python -m slipstream.openmmlab` passes these options to the Runner in the SLIPSTREAM_SPEED environment variable.
Processes that the script starts inherit this variable.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from slipstream.config import parse_override
from slipstream.config.merge import merge, nest
from slipstream.errors import ConfigError

__all__ = ["VARIABLE", "merge_environment", "split_speed"]

VARIABLE = "SLIPSTREAM_SPEED"


def split_speed(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the speed options at the start of the arguments, and the other arguments.

    Raises:
        ConfigError: if no option follows `--speed`, or an option is invalid.
    """
    if not arguments or arguments[0] != "--speed":
        return [], list(arguments)
    options = list(takewhile(_is_option, arguments[1:]))
    if not options:
        raise ConfigError(
            "--speed requires options; use --speed OPTION=VALUE ... SCRIPT.py, for example --speed compile=True"
        )
    _parse(options)
    return options, list(arguments[1 + len(options) :])


def merge_environment(speed: Any) -> Any:
    """Merge the options in the environment variable, which take precedence, into a Runner's `speed`.

    Raises:
        ConfigError: if an option in the environment variable is invalid.
    """
    options = shlex.split(os.environ.get(VARIABLE, ""))
    if not options:
        return speed
    base = speed if isinstance(speed, Mapping) else {} if speed is None else {speed: True}
    overrides = _parse(options)
    # Options such as compile.scope=block replace compile=True.
    base = {key: value for key, value in base.items() if isinstance(value, dict) or key not in overrides}
    return merge(base, overrides)


def _is_option(text: str) -> bool:
    return text == "auto" or "=" in text


def _parse(options: Sequence[str]) -> dict[str, Any]:
    plan: dict[str, Any] = {}
    for text in options:
        key, value = ("auto", True) if text == "auto" else parse_override(text)
        if isinstance(plan.get(key.partition(".")[0]), bool):
            plan.pop(key.partition(".")[0])
        plan = merge(plan, nest(key, value))
    return plan
