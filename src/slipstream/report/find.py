"""Find the run folders under a folder, and summarize each run in one row."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError, DataError
from slipstream.report.advice import mean_speed
from slipstream.report.curve import Curve
from slipstream.report.files import JSON, read_run
from slipstream.report.log_files import log_file
from slipstream.report.record import RunRecord

__all__ = ["COLUMNS", "RunRow", "find_runs", "is_run", "read_row", "run_folder"]

_MAX_DEPTH = 5
"""Number of folder levels that are searched."""


@dataclass(frozen=True)
class RunRow:
    """One run in a list of runs."""

    folder: Path
    status: str
    """The run's status, or `unreadable`."""
    record: RunRecord | None
    problem: str = ""
    """Why the record cannot be read."""

    def value(self, key: str) -> Any:
        """Return the value of a column, of a configuration key or of a scalar.

        For a scalar (`val/mIoU`, `mIoU`), this is the latest value; with the suffix `.min` or `.max`, an extreme value.
        """
        if key in ("run", "folder"):
            return str(self.folder)
        if key == "status":
            return self.status
        return None if self.record is None else record_value(self.record, key)


def is_run(folder: Path) -> bool:
    """Return whether a folder is the log folder of a run."""
    try:
        return os.path.lexists(folder / JSON) or (folder / "vis_data").is_dir() or _has_own_log(folder)
    except OSError:
        return False


def _has_own_log(folder: Path) -> bool:
    path = log_file(folder)
    return path is not None and path.stem == folder.name


def find_runs(folder: Path) -> list[RunRow]:
    """Return a row for each run folder in `folder` and its subfolders, sorted by path.

    Damaged and incomplete runs do not cause an error; their rows contain their status.

    Raises:
        ConfigError: `folder` is not a folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; pass a folder that contains runs")
    return [read_row(run) for run in sorted(_run_folders(folder))]


def _run_folders(folder: Path) -> Iterator[Path]:
    depth = len(folder.parts)
    for path, names, _ in os.walk(folder):
        current = Path(path)
        if is_run(current):
            names.clear()
            yield current
        elif len(current.parts) - depth >= _MAX_DEPTH:
            names.clear()
        else:
            names[:] = [name for name in names if not name.startswith(".") and not name.endswith(".sharded")]


def read_row(folder: Path) -> RunRow:
    """Return the row of a run folder."""
    try:
        record = read_run(folder)
    except (DataError, OSError) as error:
        return RunRow(folder, "unreadable", None, str(error))
    return RunRow(folder, record.status, record)


def run_folder(path: Path) -> Path:
    """Return the run folder for `path`, which is a run folder, a file in a run folder, or a work_dir.

    For a work_dir, the newest training run is used, or the newest run if there is no training run.

    Raises:
        ConfigError: `path` does not exist or contains no run.
    """
    folder = path.parent if path.is_file() else path
    if not folder.is_dir():
        raise ConfigError(
            f"{path} does not exist; pass a run folder, or run 'slipstream runs' to list all runs"
        )
    if is_run(folder):
        return folder
    runs = [child for child in folder.iterdir() if child.is_dir() and is_run(child)]
    if not runs:
        raise ConfigError(
            f"{path} contains no run (no report.json and no log file); to search subfolders, use slipstream runs {path}"
        )
    return max(
        map(read_row, runs), key=lambda row: (_has_training(row), row.value("started") or "", row.folder.name)
    ).folder


def _has_training(row: RunRow) -> bool:
    record = row.record
    if record is None or not any(name.startswith("train/") for name in record.curves):
        return False
    return record.source == "logs" or record.iteration > record.start_iteration  # the curves may be inherited


def record_value(record: RunRecord, key: str) -> Any:
    """Return the value named `key` from a record, or None if there is none; see `RunRow.value`."""
    if key in _RECORD_COLUMNS:
        return _RECORD_COLUMNS[key](record)
    if (curve := _curve(record, key)) is not None:
        return curve.last()
    scalar, _, kind = key.rpartition(".")
    scalar = "train/loss" if scalar == "loss" else scalar  # as in the column `loss`
    if kind in ("min", "max") and (curve := _curve(record, scalar)) is not None:
        return curve.lowest() if kind == "min" else curve.highest()
    return record.config.get(key)


def _curve(record: RunRecord, name: str) -> Curve | None:
    names = (name, f"val/{name}", f"test/{name}", f"train/{name}")
    return next((record.curves[key] for key in names if key in record.curves), None)


_RECORD_COLUMNS: dict[str, Callable[[RunRecord], Any]] = {
    "name": lambda record: record.name,
    "started": lambda record: record.started,
    "iteration": lambda record: record.iteration,
    "epoch": lambda record: record.epoch,
    "seconds": lambda record: record.seconds,
    "step": lambda record: record.step,
    "loss": lambda record: record_value(record, "train/loss"),
    "images_per_second": mean_speed,
}
COLUMNS = ("run", "folder", "status", *_RECORD_COLUMNS)
"""The names of the columns. `RunRow.value` also accepts the names of scalars and configuration keys."""
