"""The charts of a run: losses, metrics, learning rates, speed and memory."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from slipstream.report.record import RunRecord
from slipstream.report.style import table
from slipstream.report.svg import STYLES, Line, line_chart
from slipstream.scalars import is_learning_rate, number

__all__ = ["MAX_CHARTS", "curve_charts", "figure", "is_per_class"]

MAX_CHARTS = 24
"""Maximum number of charts on a page; the remaining scalars are listed in a table."""


def curve_charts(record: RunRecord) -> str:
    """Return the charts of a run, or an empty string if the run recorded nothing."""
    groups = list(_groups(record))
    charts = [
        chart for title, unit, names in groups[:MAX_CHARTS] if (chart := _chart(record, title, unit, names))
    ]
    rest = [name for _, _, names in groups[MAX_CHARTS:] for name in names]
    if not charts:
        return ""
    rows = [[name, number(record.curves[name].last())] for name in rest]
    more = (
        f"<h3>Latest values of the other scalars</h3>{table(['scalar', 'value'], rows, (1,))}" if rows else ""
    )
    return (
        f'<div class="charts">{"".join(charts)}</div><p class="note">Each point of a training curve is the mean over '
        "the steps since the previous point; the band shows the minimum and maximum. Long curves are shortened by "
        f"merging points. A cross at the upper edge marks values that are NaN or infinite.</p>{more}"
    )


def _groups(record: RunRecord) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the title, unit and curve names of each chart, starting with the most important chart."""
    names = list(record.curves)
    rates = [name for name in names if is_learning_rate(name)]
    training = [name for name in names if name.startswith("train/") and name not in rates]
    times = [name for name in training if name in ("train/time", "train/data_time")]
    if "train/loss" in names:
        yield "train/loss", "", ["train/loss"]
    for name in names:
        if name.startswith(("val/", "test/")) and not is_per_class(record, name):
            yield name, "", [name]
    # A curve without a group (`train/lr`) repeats the curve of the optimizer's first parameter group.
    group_rates = [name for name in rates if not any(other.startswith(f"{name}/") for other in rates)]
    for start in range(0, len(group_rates), STYLES):
        yield "learning rate", "", group_rates[start : start + STYLES]
    if "speed/images_per_second" in names:
        yield "training speed", "images/s", ["speed/images_per_second"]
    if times:
        yield "step time and time waiting for data", "seconds", times
    memory = [name for name in names if name.startswith("memory/")]
    if memory:
        yield "memory", "MiB", memory
    for name in training:
        if name not in times and name != "train/loss":
            yield name, "", [name]


def is_per_class(record: RunRecord, name: str) -> bool:
    """Return whether a scalar is a per-class metric in the class table, such as `val/IoU/road`."""
    return bool(record.confusions) and any(
        name.endswith(f"IoU/{each}") for each in record.confusions[0].classes
    )


def _chart(record: RunRecord, title: str, unit: str, names: list[str]) -> str:
    lines = [Line(name.partition("/")[2], record.curves[name]) for name in names]
    from_logs = record.source == "logs" and names[0].startswith(("val/", "test/"))
    return figure(title, line_chart(title, lines, "logged step" if from_logs else "iteration", unit))


def figure(title: str, svg: str) -> str:
    """Return a chart with its title, or an empty string if the chart is empty."""
    return f"<figure><h3>{escape(title)}</h3>{svg}</figure>" if svg else ""
