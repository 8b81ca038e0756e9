"""Replace some `_target_` dicts in SuperGradients recipes with built-in values, without importing their targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from slipstream.errors import ConfigError

__all__ = ["replace_targets"]

_MAX_ITEMS = 100_000


def replace_targets(value: Any, path: str = "") -> Any:
    """Return `value` with `_target_` dicts for lists, ranges, enums and COCO classes replaced by built-in values.

    Other `_target_` dicts configure components, and are not changed.

    Raises:
        ConfigError: if the arguments of a range are invalid, or the range has more than 100,000 numbers.
    """
    if isinstance(value, list):
        return [replace_targets(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    target = str(value.get("_target_", ""))
    if (function := _RANGES.get(target)) is not None:
        return _call(function, target, value, path)
    name = target.rpartition(".")[2]
    if name == "empty_list":
        return []
    if name == "coco_sub_classes_inclusion_tuples_list":
        return "voc"
    if name == "StrictLoad":
        return value.get("value", True)
    if name == "MultiGPUMode":
        return value.get("value")
    return {
        key: replace_targets(item, f"{path}.{key}" if path else str(key))
        for key, item in value.items()
        if key != "_convert_"
    }


def _call(function: Callable[..., list[float]], target: str, value: Mapping[str, Any], path: str) -> Any:
    arguments = {
        key: item for key, item in value.items() if not str(key).startswith("_") and item is not None
    }
    try:
        return function(*(value.get("_args_") or ()), **arguments)
    except (TypeError, ZeroDivisionError, OverflowError, ValueError) as error:
        raise ConfigError(f"invalid arguments for {target}: {error}", path) from None


def _arange(start: float = 0, stop: float | None = None, step: float = 1, dtype: Any = None) -> list[float]:
    """Return the values of `numpy.arange` as a list."""
    first, end = (0, start) if stop is None else (start, stop)
    count = _check_count(max(0, math.ceil((end - first) / step)))
    return [first + index * step for index in range(count)]


def _linspace(
    start: float, stop: float, num: int = 50, endpoint: bool = True, dtype: Any = None
) -> list[float]:
    """Return the values of `numpy.linspace` as a list."""
    steps = max(_check_count(num) - bool(endpoint), 1)
    numbers = [start + index * (stop - start) / steps for index in range(num)]
    return [*numbers[:-1], float(stop)] if endpoint and num > 1 else numbers


def _check_count(count: int) -> int:
    if count > _MAX_ITEMS:
        raise ValueError(f"the range has {count:,} numbers, but at most {_MAX_ITEMS:,} are allowed")
    return count


_RANGES: Mapping[str, Callable[..., list[float]]] = {"numpy.arange": _arange, "numpy.linspace": _linspace}
"""Functions that recipes use to compute `lr_updates`."""
