"""The page and the CSV file that compare several runs."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from slipstream.report.advice import NON_TRAINING_PHASES, mean_speed, training_seconds
from slipstream.report.charts import MAX_CHARTS, figure
from slipstream.report.config_values import has_unknown_value
from slipstream.report.curve import Curve
from slipstream.report.record import RunRecord
from slipstream.report.style import document, section, table
from slipstream.report.svg import STYLES, Line, line_chart
from slipstream.report.utilization import utilization
from slipstream.scalars import number

__all__ = ["MAX_RUNS", "ComparedRun", "compare", "comparison_csv", "comparison_page"]

MAX_RUNS = STYLES
"""Maximum number of runs in a comparison. Each run has its own line style."""
_UNKNOWN = "unknown"
_NOT_SET = "not set"
_RUN_SPECIFIC_SETTINGS = ("work_dir", "experiment_name", "resume", "load_from")


@dataclass(frozen=True)
class ComparedRun:
    """A run in a comparison."""

    label: str
    """The run folder, relative to the innermost folder that contains all compared runs."""
    folder: Path
    record: RunRecord


def compare(runs: Sequence[tuple[Path, RunRecord]]) -> list[ComparedRun]:
    """Return the runs, labeled with their folders relative to the innermost folder that contains all of them."""
    parent = Path(os.path.commonpath([folder.absolute().parent for folder, _ in runs]))
    return [
        ComparedRun(folder.absolute().relative_to(parent).as_posix(), folder, record)
        for folder, record in runs
    ]


def comparison_page(runs: Sequence[ComparedRun]) -> str:
    """Return the HTML page that compares runs: results, time breakdown, differing settings and curves."""
    labels = [run.label for run in runs]
    numeric = tuple(range(1, len(runs) + 1))
    sections = [
        f"<h1>Comparison of {len(runs)} runs</h1>",
        section(
            "Results",
            table(["", *labels], [[name, *map(_format, row)] for name, row in _results(runs)], numeric),
        ),
        section("Time breakdown, percent of training time", _time_breakdown(runs)),
        section("Settings that differ", _settings(runs)),
        section("Curves", _charts(runs)),
    ]
    return document(f"{', '.join(labels)} – Slipstream comparison", "\n".join(filter(None, sections)))


def comparison_csv(runs: Sequence[ComparedRun]) -> str:
    """Return a CSV table with one row per run: results, time breakdown in percent, and the settings that differ.

    Strings that a spreadsheet would interpret as formulas are prefixed with an apostrophe.
    """
    rows = [*_results(runs), *((f"time % {name}", row) for name, row in _shares(runs)), *_differences(runs)]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["run", *(_cell(name) for name, _ in rows)])
    for index, run in enumerate(runs):
        writer.writerow([_cell(run.label), *(_cell(row[index]) for _, row in rows)])
    return file.getvalue()


def _cell(value: Any) -> Any:
    return (
        f"'{value}"
        if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
        else value
    )


def _format(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _results(runs: Sequence[ComparedRun]) -> list[tuple[str, list[Any]]]:
    """Return the results by name, including the last value of each curve and the extremes of each metric."""
    records = [run.record for run in runs]
    rows: list[tuple[str, list[Any]]] = [
        ("status", [record.status for record in records]),
        ("iteration", [record.iteration for record in records]),
        ("duration, s", [round(record.seconds, 3) for record in records]),
        ("images/s, mean", [mean_speed(record) for record in records]),
    ]
    if any(utilizations := [utilization(record) for record in records]):
        rows.append(("model FLOPs utilization", utilizations))
    names = dict.fromkeys(name for record in records for name in record.curves)
    for name in names:
        rows.append((f"{name}, last", [_curve_value(record, name, "last") for record in records]))
        if name.startswith(("val/", "test/")):
            rows += [
                (f"{name}, {kind}", [_curve_value(record, name, kind) for record in records])
                for kind in ("min", "max")
            ]
    return rows


def _curve_value(record: RunRecord, name: str, kind: str) -> float | None:
    curve = record.curves.get(name)
    if curve is None:
        return None
    return {"last": curve.last, "min": curve.lowest, "max": curve.highest}[kind]()


def _shares(runs: Sequence[ComparedRun]) -> list[tuple[str, list[Any]]]:
    phases = dict.fromkeys(
        phase for run in runs for phase in run.record.phases.seconds if phase not in NON_TRAINING_PHASES
    )
    return [(phase, [_share(run.record, phase) for run in runs]) for phase in phases]


def _share(record: RunRecord, phase: str) -> float | None:
    total = training_seconds(record)
    return round(100 * record.phases.seconds.get(phase, 0.0) / total, 2) if total else None


def _time_breakdown(runs: Sequence[ComparedRun]) -> str:
    rows = [[name, *map(_format, row)] for name, row in _shares(runs)]
    if not rows:
        return ""
    return table(["host time", *(run.label for run in runs)], rows, tuple(range(1, len(runs) + 1)))


def _differences(runs: Sequence[ComparedRun]) -> list[tuple[str, list[Any]]]:
    """Return the settings and versions that differ between the runs whose settings are known.

    A value is `not set` if the run does not have the setting, and `unknown` if the settings of the run were not
    recorded.
    """
    records = [run.record for run in runs]
    keys = sorted({key for record in records for key in record.config} - set(_RUN_SPECIFIC_SETTINGS))
    rows = [(key, [_setting(record.config, key) for record in records]) for key in keys]
    # The environment contains the seed because the configuration may not.
    configured = [
        (record.config.get("randomness.seed"), record.environment.get("seed")) for record in records
    ]
    hidden = {"seed"} if all(str(seed) == used for seed, used in configured) else set()
    names = sorted({name for record in records for name in record.environment} - hidden)
    rows += [
        (f"environment: {name}", [_setting(record.environment, name) for record in records]) for name in names
    ]
    return [(key, row) for key, row in rows if _differ([value for value in row if value is not _UNKNOWN])]


def _setting(values: Mapping[str, Any], key: str) -> Any:
    return values.get(key, _NOT_SET) if values else _UNKNOWN


def _differ(values: Sequence[Any]) -> bool:
    # In JSON, unlike in Python, 1, 1.0 and true differ, even inside lists.
    return len({(value is _NOT_SET, json.dumps(value)) for value in values}) > 1


def _settings(runs: Sequence[ComparedRun]) -> str:
    unknown = [run.label for run in runs if not run.record.config]
    note = ""
    if unknown:
        text = f"The configuration is unknown for runs without a report.json file: {', '.join(unknown)}."
        note = f'<p class="note">{escape(text)}</p>'
    if uncompared := _uncompared(runs):
        text = (
            "These settings contain objects, local functions or secrets, whose values are not recorded and may differ: "
            f"{uncompared}."
        )
        note += f'<p class="note">{escape(text)}</p>'
    rows = [[key, *map(str, row)] for key, row in _differences(runs)]
    if not rows:
        return f'{note}<p class="note">The recorded settings are identical.</p>'
    return note + table(["setting", *(run.label for run in runs)], rows)


def _uncompared(runs: Sequence[ComparedRun]) -> str:
    """Return the names of the settings whose values are the same in the records, but may differ in the runs."""
    values = (item for run in runs for item in run.record.config.items())
    differing = {name for name, _ in _differences(runs)}
    names = {name for name, value in values if has_unknown_value(value)} - differing
    return ", ".join(sorted(names))


def _charts(runs: Sequence[ComparedRun]) -> str:
    names = sorted(
        dict.fromkeys(name for run in runs for name in run.record.curves),
        key=lambda name: (name != "train/loss", not name.startswith(("val/", "test/"))),
    )
    charts = []
    for name in names[:MAX_CHARTS]:
        # A run without this curve keeps its line style in the other charts.
        lines = [Line(run.label, run.record.curves.get(name, Curve())) for run in runs]
        charts.append(figure(name, line_chart(name, lines, "iteration", bands=False)))
    note = '<p class="note">Each point of a training curve is the mean over the steps since the previous point.</p>'
    return f'<div class="charts">{"".join(charts)}</div>{note}' if charts else ""
