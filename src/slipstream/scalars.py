"""Format scalars, and recognize learning rates by their names."""

from __future__ import annotations

import math


def is_learning_rate(name: str) -> bool:
    """Return whether a scalar is a learning rate.

    Learning rates are named `train/lr` or `train/<optimizer>.lr`, optionally followed by `/<group>`.
    """
    kind, _, rest = name.partition("/")
    optimizer = rest.partition("/")[0]
    return kind == "train" and (optimizer == "lr" or optimizer.endswith(".lr"))


def number(value: float | None, digits: int = 4) -> str:
    """Return a number as a short string with `digits` significant digits; None is shown as a dash."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinity" if value > 0 else "-infinity"
    if value and not 1e-3 <= abs(value) < 1e6:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    text = f"{value:,.{max(digits - 1 - _magnitude(value), 0)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _magnitude(value: float) -> int:
    return math.floor(math.log10(abs(value))) if value else 0
