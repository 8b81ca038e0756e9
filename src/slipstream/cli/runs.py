"""`slipstream runs`: list the runs in a folder."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.tables import print_table, printable
from slipstream.typecheck import is_real

if TYPE_CHECKING:
    from slipstream.report.find import RunRow

__all__ = ["run"]

_MAX_METRICS = 3
"""Maximum number of metrics shown as columns."""


def run(args: argparse.Namespace) -> int:
    """Print a table of the runs and, for each run that cannot be read, the reason."""
    from slipstream.errors import ConfigError
    from slipstream.report import find_runs

    folder = Path(args.folder)
    rows = find_runs(folder)
    if not rows:
        print("[]" if args.json else f"No runs found in {folder}")
        return 0
    key = args.sort.removesuffix("-")
    readable = [row for row in rows if row.record is not None]
    if readable and all(row.value(key) is None for row in rows):
        raise ConfigError(f"cannot sort by '{key}': no run has a value for it{_hint(key, rows)}", "--sort")
    for name, _ in args.filter:
        if readable and all(row.value(name) is None for row in rows):
            raise ConfigError(f"no run has a value for '{name}'{_hint(name, rows)}", "--filter")
    for name in args.columns:
        if readable and all(row.value(name) is None for row in rows):
            raise ConfigError(f"no run has a value for '{name}'{_hint(name, rows)}", "--columns")
    rows = [row for row in rows if all(_equals(row.value(name), text) for name, text in args.filter)]
    if not rows and not args.json:
        print("No run matches the filters")
        return 0
    rows = _sort(rows, key, args.sort.endswith("-"))
    default_columns = [*_keys(rows, ()), "run"]
    columns = (
        args.columns if {key, f"val/{key}"} & {*default_columns, *args.columns} else [*args.columns, key]
    )
    if args.json:
        print(json.dumps(list(_values(rows, columns)), indent=1, default=str))
        return 0
    _print(folder, rows, columns)
    for row in rows:
        if row.problem:
            print(printable(f"{row.folder}: {row.problem}"))
    return 0


def _hint(key: str, rows: Sequence[RunRow]) -> str:
    from slipstream.errors import did_you_mean
    from slipstream.report.find import COLUMNS

    known = set(COLUMNS)
    for row in rows:
        if row.record is not None:
            known |= {
                *row.record.config,
                *row.record.curves,
                *(name.partition("/")[2] for name in row.record.curves),
            }
    return did_you_mean(key, sorted(known))


def _equals(value: Any, text: str) -> bool:
    """Return whether a value equals the string from a `--filter` option; numbers are compared as numbers."""
    if is_real(value):
        try:
            other = float(text)
            return math.isclose(value, other, rel_tol=1e-9) or (math.isnan(value) and math.isnan(other))
        except ValueError:
            return False
    return str(value).lower() == text.lower()


def _sort(rows: Sequence[RunRow], key: str, descending: bool) -> list[RunRow]:
    """Return the rows sorted by a value. Rows with a missing or NaN value are always at the end.

    In ascending order, numbers come before strings.
    """
    known = [row for row in rows if not _is_missing(row.value(key))]
    known.sort(key=lambda row: _sort_key(row.value(key)), reverse=descending)
    return [*known, *(row for row in rows if _is_missing(row.value(key)))]


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _is_non_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _sort_key(value: Any) -> tuple[bool, float, str]:
    is_number = isinstance(value, int | float)
    return not is_number, float(value) if is_number else 0.0, "" if is_number else str(value)


def _values(rows: Sequence[RunRow], columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the columns of each run as a dict. NaN and infinity become strings, because JSON cannot represent them."""
    for row in rows:
        values = {key: row.value(key) for key in _keys(rows, columns)}
        finite = {key: str(value) if _is_non_finite(value) else value for key, value in values.items()}
        yield {"run": str(row.folder), **finite, "problem": row.problem}


def _keys(rows: Sequence[RunRow], columns: Sequence[str]) -> list[str]:
    return ["status", "started", "iteration", "loss", *_metrics(rows), "images_per_second", *columns]


def _print(folder: Path, rows: Sequence[RunRow], columns: Sequence[str]) -> None:
    keys = _keys(rows, columns)
    header = ["run", *(key.replace("images_per_second", "images/s") for key in keys)]
    names = [row.folder.relative_to(folder) if row.folder != folder else row.folder.name for row in rows]
    cells = [
        [printable(str(name)), *(_format(row.value(key)) for key in keys)]
        for name, row in zip(names, rows, strict=True)
    ]
    print_table(header, cells, None, right=header[3:])


def _metrics(rows: Sequence[RunRow]) -> list[str]:
    """Return the most common validation metrics, excluding per-class values."""
    counts: dict[str, int] = {}
    for row in rows:
        for name in row.record.curves if row.record else ():
            if name.startswith("val/") and "IoU/" not in name:
                counts[name] = counts.get(name, 0) + 1
    return sorted(counts, key=lambda name: -counts[name])[:_MAX_METRICS]


def _format(value: Any) -> str:
    from slipstream.scalars import number

    if value is None:
        return "–"
    return number(value) if isinstance(value, float) else printable(str(value))
