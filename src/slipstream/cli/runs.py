"""`slipstream runs` lists the runs in a folder, and `slipstream report` writes the report of a run."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.tables import print_table, printable
from slipstream.errors import ConfigError
from slipstream.typecheck import is_real

if TYPE_CHECKING:
    from slipstream.report.files import RunRow

# Maximum number of metrics shown as columns.
_MAX_METRICS = 3


def run(args: argparse.Namespace) -> int:
    """Print a table of the runs and, for each run that cannot be read, the reason."""
    from slipstream.report import find_runs

    folder = Path(args.folder)
    rows = find_runs(folder)
    sort_key = args.sort.removesuffix("-")
    filters = dict(args.filter)
    _check_keys(rows, {"--sort": [sort_key], "--filter": filters, "--columns": args.columns})
    rows = [row for row in rows if all(_equals(row.value(key), text) for key, text in filters.items())]
    if not rows and not args.json:
        print(f"No runs found in {folder}")
        return 0
    rows = _sort(rows, sort_key, args.sort.endswith("-"))
    keys = [
        "status",
        "started",
        "iteration",
        "train/loss",
        *_metrics(rows),
        "images_per_second",
        *args.columns,
    ]
    if not {sort_key, f"val/{sort_key}"} & {*keys, "run", "folder"}:
        keys.append(sort_key)
    if args.json:
        print(json.dumps([_values(row, keys) for row in rows], indent=1, default=str))
        return 0
    header = ["run", *(key.replace("images_per_second", "images/s").removeprefix("train/") for key in keys)]
    cells = [
        [printable(str(row.folder.relative_to(folder))), *(_format(row.value(key)) for key in keys)]
        for row in rows
    ]
    print_table(header, cells, None, right=header[3:])
    for row in rows:
        if row.problem:
            print(printable(f"{row.folder}: {row.problem}"))
    return 0


def _check_keys(rows: Sequence[RunRow], keys: dict[str, Any]) -> None:
    for option, names in keys.items():
        for name in names:
            if any(row.record for row in rows) and all(row.value(name) is None for row in rows):
                raise ConfigError(
                    f"no run has a value for '{name}'; use a column, a scalar or a setting", option
                )


def _equals(value: Any, text: str) -> bool:
    """Return whether a value equals the string from a `--filter` option; numbers are compared as numbers."""
    if is_real(value):
        try:
            return math.isclose(value, float(text), rel_tol=1e-9)
        except ValueError:
            return False
    return str(value).lower() == text.lower()


def _sort(rows: Sequence[RunRow], key: str, descending: bool) -> list[RunRow]:
    """Return the rows sorted by a value: numbers, then strings, and always at the end, missing and NaN values."""

    def sort_key(row: RunRow) -> tuple[bool, float, str]:
        value = row.value(key)
        return (False, float(value), "") if is_real(value) else (True, 0.0, str(value))

    missing = [row for row in rows if row.value(key) is None or row.value(key) != row.value(key)]
    known = [row for row in rows if row not in missing]
    return [*sorted(known, key=sort_key, reverse=descending), *missing]


def _values(row: RunRow, keys: Sequence[str]) -> dict[str, Any]:
    """Return the columns of a run. NaN and infinity become strings, because JSON cannot represent them."""
    values = {key: row.value(key) for key in keys}
    finite = {k: v if not isinstance(v, float) or math.isfinite(v) else str(v) for k, v in values.items()}
    return {"run": str(row.folder), **finite, "problem": row.problem}


def _metrics(rows: Sequence[RunRow]) -> list[str]:
    """Return the most common validation metrics, excluding per-class values."""
    names = (name for row in rows for name in (row.record.curves if row.record else ()))
    counts = Counter(name for name in names if name.startswith("val/") and "IoU/" not in name)
    return [name for name, _ in counts.most_common(_MAX_METRICS)]


def _format(value: Any) -> str:
    from slipstream.scalars import number

    if value is None:
        return "–"
    return number(value) if isinstance(value, float) else printable(str(value))


def report(args: argparse.Namespace) -> int:
    """Write the report, and print the path of the page."""
    from slipstream.report import read_run, run_folder, write_report
    from slipstream.report.page import page

    if len(args.runs) > 1:
        raise ConfigError(
            "one report shows one run; compare runs with TensorBoard (docs/report.md) or slipstream runs"
        )
    folder = run_folder(Path(args.runs[0]))
    try:
        record = read_run(folder)
        if args.out is None:
            path = write_report(record, folder)
        else:
            path = Path(args.out)
            path.write_text(page(record, folder), encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot write the report ({error}); choose a file with --out") from error
    print(printable(f"Wrote {path}"))
    return 0
