"""A small line chart as SVG, without style sheets, so that it also works as an image in a notebook."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import groupby
from typing import Any

from slipstream.report.record import Curve
from slipstream.scalars import number

_WIDTH, _HEIGHT = 460, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 452, 8, 146


def line_chart(title: str, curve: Curve) -> str:
    """Return a chart of a curve: a line through the means, and a band between the minima and maxima.

    Points without finite values interrupt the line. The result is empty if the curve has no finite values.
    """
    low, high = curve.lowest(), curve.highest()
    if low is None or high is None:
        return ""
    spread, first, last = (high - low) or 1.0, curve.x[0], curve.x[-1]

    def at(x: int, y: float) -> str:
        across = (x - first) / ((last - first) or 1)
        up = (y - low) / spread if high > low else 0.5
        return f"{_LEFT + across * (_RIGHT - _LEFT):.1f},{_BOTTOM - up * (_BOTTOM - _TOP):.1f}"

    parts = []
    for value in (low, (low + high) / 2, high) if high > low else (low,):
        y = at(first, value).partition(",")[2]
        parts.append(f'<path d="M{_LEFT},{y}H{_RIGHT}" stroke="#8886" fill="none"/>')
        parts.append(
            f'<text x="{_LEFT - 6}" y="{float(y) + 4}" text-anchor="end">{escape(number(value, 3))}</text>'
        )
    points: Iterable[Any] = zip(curve.x, curve.mean, curve.low, curve.high, strict=True)
    for finite, group in groupby(points, key=lambda point: point[1] is not None):
        if finite:
            run = list(group)
            band = [at(x, y) for x, _, _, y in run] + [at(x, y) for x, _, y, _ in reversed(run)]
            mean = " ".join(at(x, y) for x, y, _, _ in run)
            parts.append(f'<polygon points="{" ".join(band)}" fill="#2a6fb0" opacity=".2"/>')
            mark = at(run[0][0], run[0][1]).split(",")
            parts.append(
                f'<circle cx="{mark[0]}" cy="{mark[1]}" r="2" fill="#2a6fb0"/>' if len(run) == 1 else ""
            )
            parts.append(f'<polyline points="{mean}" fill="none" stroke="#2a6fb0" stroke-width="1.8"/>')
    parts.append(
        f'<text x="{_LEFT}" y="164">{first:,}</text><text x="{_RIGHT}" y="164" text-anchor="end">{last:,}</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(title)}" font-family="system-ui,sans-serif" font-size="11" fill="#888">'
        f"{''.join(parts)}</svg>"
    )
