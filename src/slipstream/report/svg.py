"""Line charts as inline SVG, readable without color: each line has a label and its own dash pattern."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from slipstream.report.curve import Curve
from slipstream.scalars import number

__all__ = ["STYLES", "Line", "line_chart"]

STYLES = 8
"""Number of line styles (color and dashes) in the style sheet."""
_WIDTH, _HEIGHT = 520, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 10, 34
_MAX_POINTS = 400
_MAX_VALUE = 1e300
"""Larger values are drawn beyond the edge, because the range of an axis must be finite."""
_MAX_MARKED_POINTS = 40
"""If a line has at most this many points, each point is marked with a circle."""


@dataclass(frozen=True)
class Line:
    """One line of a chart: its label and its points."""

    label: str
    curve: Curve


def line_chart(title: str, lines: Sequence[Line], x_label: str, unit: str = "", bands: bool = True) -> str:
    """Return a chart as an SVG element, or an empty string if no line has any points.

    A line connects the means of the points, and a band spans their minima and maxima. Points without finite values
    interrupt the line. Points with NaN or infinite values are marked with a cross at the upper edge.

    Args:
        title: description of the chart, used as the accessible name of the element.
        lines: at most `STYLES` lines; a line without points is omitted, but the others keep their styles.
        x_label: label of the horizontal axis.
        unit: unit of the vertical axis, shown in its label.
        bands: whether to draw the bands.
    """
    drawn = [Line(line.label, line.curve.points(_MAX_POINTS)) for line in lines]
    if not any(len(line.curve) for line in drawn):
        return ""
    bounds = [
        c for line in drawn for c in ((line.curve.low, line.curve.high) if bands else (line.curve.mean,))
    ]
    extremes = (v for curve in bounds for v in curve if v is not None)
    values = [min(max(value, -_MAX_VALUE), _MAX_VALUE) for value in extremes]
    y_axis = _Axis.for_values(values)
    x_axis = _Axis.linear([x for line in drawn for x in line.curve.x], integers=True)
    parts = [
        _grid(y_axis, x_axis),
        *(_line(line, index, y_axis, x_axis, bands) for index, line in enumerate(drawn)),
    ]
    scale = " (log scale)" if y_axis.log else ""
    caption = f"{unit}{scale}".strip()
    if caption:
        parts.append(f'<text class="axis" x="{_LEFT}" y="{_TOP - 1}" dy="-2">{escape(caption)}</text>')
    parts.append(
        f'<text class="axis" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 3}" text-anchor="end">{escape(x_label)}</text>'
    )
    legend = _legend(drawn) if len(drawn) > 1 else ""
    return (
        f'<svg viewBox="0 -12 {_WIDTH} {_HEIGHT + 12}" role="img" aria-label="{escape(title, quote=True)}">'
        f"{''.join(parts)}</svg>{legend}"
    )


@dataclass(frozen=True)
class _Axis:
    """A mapping from values to the unit interval, with tick positions."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    @classmethod
    def for_values(cls, values: Sequence[float]) -> _Axis:
        """Return an axis that covers the values.

        The scale is logarithmic if all values are positive and the middle 90% of them span more than two decades.
        """
        ranked = sorted(values)
        if ranked and ranked[0] > 0:
            low, high = ranked[len(ranked) // 20], ranked[-1 - len(ranked) // 20]
            if high > 100 * low:
                exponents = range(math.floor(math.log10(ranked[0])), math.ceil(math.log10(ranked[-1])) + 1)
                stride = -(-len(exponents) // 6)
                ticks = tuple(10.0**e for e in exponents[::stride])
                return cls(10.0 ** exponents[0], 10.0 ** exponents[-1], ticks, True)
        return cls.linear(ranked)

    @classmethod
    def linear(cls, values: Sequence[float], integers: bool = False) -> _Axis:
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        if high - low <= 1e-9 * max(abs(low), abs(high)):
            margin = 1.0 if integers else (abs(high) or 1.0) * 0.1
            low, high = low - margin, high + margin
        step = _round_step((high - low) / 5)
        if integers:
            step = max(1.0, step)
        else:
            low, high = math.floor(low / step) * step, math.ceil(high / step) * step
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        return cls(low, high, tuple(index * step for index in range(first, last + 1)))

    def position(self, value: float) -> float:
        if self.log:
            low, high, value = math.log10(self.low), math.log10(self.high), math.log10(max(value, self.low))
        else:
            low, high = self.low, self.high
        return (value - low) / (high - low)


def _round_step(step: float) -> float:
    """Return the smallest number of the form 1, 2 or 5 times 10**n that is at least `step`, or 1 if `step` is tiny."""
    if step < 1e-300:
        return 1.0
    base = 10.0 ** math.floor(math.log10(step))
    return next(factor * base for factor in (1, 2, 5, 10) if factor * base >= step * (1 - 1e-9))


def _x(axis: _Axis, value: float) -> float:
    return round(_LEFT + axis.position(value) * (_WIDTH - _LEFT - _RIGHT), 1)


def _y(axis: _Axis, value: float) -> float:
    return round(_HEIGHT - _BOTTOM - axis.position(value) * (_HEIGHT - _TOP - _BOTTOM), 1)


def _grid(y_axis: _Axis, x_axis: _Axis) -> str:
    parts = []
    for tick in y_axis.ticks:
        y = _y(y_axis, tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(
            f'<text class="axis" x="{_LEFT - 6}" y="{y}" dy="0.32em" text-anchor="end">{number(tick, 3)}</text>'
        )
    bottom = _HEIGHT - _BOTTOM
    for tick in x_axis.ticks:
        x = _x(x_axis, tick)
        parts.append(f'<line class="tick" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(
            f'<text class="axis" x="{x}" y="{bottom + 16}" text-anchor="middle">{number(tick, 6)}</text>'
        )
    parts.append(f'<line class="frame" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    return "".join(parts)


def _line(line: Line, index: int, y_axis: _Axis, x_axis: _Axis, bands: bool) -> str:
    curve, style = line.curve, f"s{index % STYLES}"
    parts = []
    for first, last in _segments(curve.mean):
        points = [
            (_x(x_axis, curve.x[i]), _y(y_axis, m))
            for i in range(first, last)
            if (m := curve.mean[i]) is not None
        ]
        if bands and (band := _band(curve, first, last, y_axis, x_axis)):
            parts.append(f'<path class="band {style}" d="{band}"/>')
        if len(points) > 1:
            path = "M" + "L".join(f"{x} {y}" for x, y in points)
            parts.append(f'<path class="line {style}" d="{path}"/>')
        if len(points) == 1 or len(curve) <= _MAX_MARKED_POINTS:
            parts += [f'<circle class="dot {style}" cx="{x}" cy="{y}" r="2.4"/>' for x, y in points]
    for x, bad in zip(curve.x, curve.bad, strict=True):
        if bad:
            center = _x(x_axis, x)
            parts.append(
                f'<path class="bad" d="M{center - 4} {_TOP - 4}l8 8m0 -8l-8 8">'
                f"<title>{bad} NaN or infinite value{'' if bad == 1 else 's'} between the previous point and step "
                f"{number(x, 9)}</title></path>"
            )
    return "".join(parts)


def _segments(values: Sequence[float | None]) -> list[tuple[int, int]]:
    """Return the ranges (first, end) of consecutive values that are not None."""
    segments, first = [], None
    for index, value in enumerate([*values, None]):
        if value is not None and first is None:
            first = index
        elif value is None and first is not None:
            segments.append((first, index))
            first = None
    return segments


def _band(curve: Curve, first: int, last: int, y_axis: _Axis, x_axis: _Axis) -> str:
    """Return the outline of the area between minimum and maximum, or an empty string if there is no such area."""
    low = [value for value in curve.low[first:last] if value is not None]
    high = [value for value in curve.high[first:last] if value is not None]
    if last - first < 2 or low == high or not len(low) == len(high) == last - first:
        return ""
    xs = [_x(x_axis, x) for x in curve.x[first:last]]
    upper = [f"{x} {_y(y_axis, value)}" for x, value in zip(xs, high, strict=True)]
    lower = [f"{x} {_y(y_axis, value)}" for x, value in zip(xs, low, strict=True)]
    return f"M{'L'.join([*upper, *reversed(lower)])}Z"


def _legend(lines: Sequence[Line]) -> str:
    items = [
        f'<li><svg class="key" viewBox="0 0 34 10" aria-hidden="true">'
        f'<path class="line s{index % STYLES}" d="M1 5H33"/>'
        f"</svg>{escape(line.label)} <b>{number(line.curve.last())}</b></li>"
        for index, line in enumerate(lines)
        if len(line.curve)
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'
