"""Checks for scheduler arguments. Each error message names the argument."""

from __future__ import annotations

from typing import Any

from slipstream.errors import ConfigError
from slipstream.typecheck import is_number, matches, short_repr

__all__ = ["INF", "check_gamma", "check_int", "check_steps", "is_number", "require", "require_end"]

INF = int(1e9)


def require(holds: bool, name: str, rule: str, value: Any) -> None:
    """Raise a `ConfigError` unless `holds` is true; `rule` describes the valid values."""
    if not holds:
        raise ConfigError(f"{name} must be {rule}, not {short_repr(value)}")


def check_int(name: str, value: Any, minimum: int) -> None:
    """Raise a `ConfigError` unless `value` is an int of at least `minimum`."""
    require(matches(value, int) and value >= minimum, name, f"an int of at least {minimum}", value)


def check_gamma(gamma: Any) -> None:
    """Raise a `ConfigError` unless `gamma` is positive."""
    require(is_number(gamma) and gamma > 0, "gamma", "a positive number", gamma)


def check_steps(name: str, steps: Any, minimum: int) -> None:
    """Raise a `ConfigError` unless `steps` is a non-empty list of ints, each of at least `minimum`."""
    fits = isinstance(steps, list | tuple) and len(steps) > 0
    require(fits, name, "a non-empty list of ints", steps)
    for index, step in enumerate(steps):
        check_int(f"{name}[{index}]", step, minimum)


def require_end(end: int, alternatives: str = "") -> None:
    """Raise a `ConfigError` unless `end` has been specified.

    The message begins with `alternatives`, the arguments that can be specified instead, such as `"T_max or "`.
    """
    if end == INF:
        raise ConfigError(f"{alternatives}end must be specified; otherwise, the value would never change")
