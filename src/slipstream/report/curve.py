"""A curve of bounded size: the mean, minimum and maximum of a scalar over the steps of a run."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.errors import DataError
from slipstream.typecheck import is_real

__all__ = ["Curve"]

_DIGITS = 7


@dataclass
class Curve:
    """A scalar over iterations. Each point summarizes the values since the previous point.

    When the curve reaches `limit` points, adjacent points are merged, so the extremes are kept for runs of any length.

    Attributes:
        limit: maximum number of points; should be even.
        x: the iteration of each point's latest value.
        mean: the mean of each point's finite values; None if there are none.
        low, high: the minimum and maximum of each point's finite values; None if there are none.
        count: number of finite values in each point.
        bad: number of values in each point that are NaN or infinite.
        newest: the latest value of each point, which may be NaN or infinite.
    """

    limit: int = 1000
    x: list[float] = field(default_factory=list)
    mean: list[float | None] = field(default_factory=list)
    low: list[float | None] = field(default_factory=list)
    high: list[float | None] = field(default_factory=list)
    count: list[int] = field(default_factory=list)
    bad: list[int] = field(default_factory=list)
    newest: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.x)

    def add(self, x: float, values: Iterable[float]) -> None:
        """Append a point that summarizes `values`, which are in step order. If `values` is empty, do nothing."""
        all_values = list(values)
        if not all_values:
            return
        finite, mean = all_values, sum(all_values) / len(all_values)
        if not math.isfinite(mean):
            finite = [value for value in all_values if math.isfinite(value)]
            mean = sum(value / len(finite) for value in finite)  # divide before summing, to avoid an overflow
        self.x.append(x)
        self.mean.append(mean if finite else None)
        self.low.append(min(finite, default=None))
        self.high.append(max(finite, default=None))
        self.count.append(len(finite))
        self.bad.append(len(all_values) - len(finite))
        self.newest.append(all_values[-1])
        if len(self) >= self.limit:
            self._merge()

    def truncate(self, x: float) -> None:
        """Remove the points whose latest value was recorded after iteration `x`."""
        count = sum(each <= x for each in self.x)
        for name in _LISTS:
            del getattr(self, name)[count:]

    def points(self, max_points: int) -> Curve:
        """Return a copy of this curve, with points merged until at most `max(max_points, 2)` remain."""
        merged = Curve(max(self.limit, len(self) + 1), **{name: list(getattr(self, name)) for name in _LISTS})
        while len(merged) > max(max_points, 2):
            merged._merge()
        return merged

    def last(self) -> float | None:
        """Return the latest value, which may be NaN or infinite; None if the curve is empty."""
        return self.newest[-1] if self.newest else None

    def lowest(self) -> float | None:
        """Return the minimum of all finite values, or None if there are none."""
        return min(_finite(self.low), default=None)

    def highest(self) -> float | None:
        """Return the maximum of all finite values, or None if there are none."""
        return max(_finite(self.high), default=None)

    def to_json(self) -> dict[str, list[Any]]:
        """Return the lists, with numbers rounded to 7 significant digits, and NaN and infinity converted to strings."""
        return {name: [_rounded(value) for value in getattr(self, name)] for name in _LISTS}

    @classmethod
    def from_json(cls, data: Any, path: str) -> Curve:
        """Return the curve written by `to_json`.

        Raises:
            DataError: `data` has a different structure; the message names `path`.
        """
        if not isinstance(data, Mapping):
            raise DataError(f"{path} must be an object, not {type(data).__name__}")
        lists = {name: data.get(name) for name in _LISTS}
        newest = data.get("newest", data.get("mean"))  # reports written by earlier versions have no `newest`
        if isinstance(newest, list):
            lists["newest"] = [_parse(value) for value in newest]
        lengths = {len(values) if isinstance(values, list) else -1 for values in lists.values()}
        if len(lengths) > 1 or -1 in lengths:
            raise DataError(f"{path} must contain lists of the same length: {', '.join(_LISTS)}")
        for name, values in lists.items():
            if not all(_ACCEPTS[name](value) for value in values or ()):
                raise DataError(f"{path}.{name} must contain {_KINDS[name]}")
        return cls(**lists)  # type: ignore[arg-type]

    def _append(self, *values: Any) -> None:
        for name, value in zip(_LISTS, values, strict=True):
            getattr(self, name).append(value)

    def _merge(self) -> None:
        """Merge adjacent pairs of points; if the number of points is odd, the last one is kept."""
        old = {name: getattr(self, name) for name in _LISTS}
        for name in _LISTS:
            setattr(self, name, [])
        for first in range(0, len(old["x"]), 2):
            pair = slice(first, first + 2)
            counts, means = old["count"][pair], old["mean"][pair]
            total = sum(counts)
            parts = (
                n / total * mean for n, mean in zip(counts, means, strict=True) if mean is not None and total
            )
            self._append(
                old["x"][pair][-1],
                math.fsum(parts) if total else None,
                min(_finite(old["low"][pair]), default=None),
                max(_finite(old["high"][pair]), default=None),
                total,
                sum(old["bad"][pair]),
                old["newest"][pair][-1],
            )


_VALUES = ("mean", "low", "high")
_MAX_COUNT = 2**53
"""Maximum step number or count. A float represents all integers up to this value exactly."""
_LISTS = ("x", "mean", "low", "high", "count", "bad", "newest")
_NON_FINITE = ("nan", "inf", "-inf")


def _finite(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _parse(value: Any) -> Any:
    """Convert a value written by `_rounded` to a number. None, which earlier versions wrote, is converted to NaN."""
    if value is None:
        return math.nan
    return float(value) if isinstance(value, str) and value in _NON_FINITE else value


def _is_finite_or_none(value: Any) -> bool:
    # Integers greater than the largest float cannot be converted to float.
    return value is None or (is_real(value) and abs(value) <= sys.float_info.max)


def _is_count(value: Any) -> bool:
    return is_real(value) and 0 <= value <= _MAX_COUNT and value == int(value)


_ACCEPTS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("x", "count", "bad"), _is_count),
    **dict.fromkeys(_VALUES, _is_finite_or_none),
    "newest": is_real,
}
_KINDS = {
    **dict.fromkeys(("x", "count", "bad"), f"integers between 0 and {_MAX_COUNT}"),
    **dict.fromkeys(_VALUES, "finite numbers or null"),
    "newest": f"numbers or the strings {', '.join(_NON_FINITE)}",
}
"""The values that `_ACCEPTS` accepts, for error messages."""


def _rounded(value: float | None) -> float | str | None:
    if not isinstance(value, float):
        return value
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else str(value)
