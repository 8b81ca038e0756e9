"""Parse JSON from files that may be damaged or written by another program."""

from __future__ import annotations

import json
import math
from typing import Any

__all__ = ["parse_json"]

_MAX_DIGITS = 300
"""Maximum number of digits in an integer. Larger integers cannot always be converted to float."""


def parse_json(text: str, allow_nan: bool = True) -> Any:
    """Parse JSON in which all numbers can be converted to float.

    Raises:
        ValueError: `text` is not valid JSON, is nested too deeply, or contains a number that is too large.
    """
    try:
        return json.loads(
            text,
            parse_int=_integer,
            parse_float=_float,
            parse_constant=float if allow_nan else _reject_constant,
        )
    except RecursionError:
        raise ValueError("the values are nested too deeply") from None


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"an integer has {len(text)} digits, but at most {_MAX_DIGITS} are allowed")
    return int(text)


def _float(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")
