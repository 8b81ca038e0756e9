"""Read durations in configurations, such as `90s`, `5m` and `1h30m`."""

from __future__ import annotations

import math
import re

from slipstream.errors import ConfigError
from slipstream.typecheck import is_number


def read_duration(value: float | str, path: str) -> float:
    """Return a duration in seconds. `value` is a number of seconds, or a string such as `300`, `90s`, `5m` or `1h30m`.

    Raises:
        ConfigError: the value is not a positive duration. The message names the config path `path`.
    """
    if isinstance(value, str):
        words = re.fullmatch(r"(?:(\d+\.?\d*)h)?(?:(\d+\.?\d*)m)?(?:(\d+\.?\d*)s?)?", value.strip())
        seconds = (
            sum(float(word or 0) * unit for word, unit in zip(words.groups(), (3600, 60, 1), strict=True))
            if words
            else math.nan
        )
    else:
        seconds = float(value) if is_number(value) else math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"must be a duration such as 5m, 90s or 1h30m, not {value!r}", path)
    return seconds
