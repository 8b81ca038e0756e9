"""Read and write the reports of runs, and find runs in a folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError, DataError
from slipstream.files import write_text
from slipstream.logging import RUN_FAILED
from slipstream.report.record import Curve, LogMessage, RunRecord
from slipstream.typecheck import is_real

JSON, HTML = "report.json", "report.html"
# Number of folder levels that are searched for runs.
_MAX_DEPTH = 5
_MAX_MESSAGES = 200
_LINE = re.compile(r"^(\d{4}/\d\d/\d\d \d\d:\d\d:\d\d) - (DEBUG|INFO|WARNING|ERROR|CRITICAL) - (.*)$")


def write_report(record: RunRecord, folder: Path) -> Path:
    """Write `report.json` and `report.html` to a run folder, each atomically, and return the path of the page."""
    from slipstream.report.page import page

    # Text from a run may contain characters that UTF-8 cannot represent, for example from a file name.
    write_text(folder / JSON, json.dumps(record.to_json(), allow_nan=False) + "\n", errors="replace")
    write_text(folder / HTML, page(record, folder), errors="replace")
    return folder / HTML


def read_run(folder: Path) -> RunRecord:
    """Return the record of a run, read from `report.json` or, if this file does not exist, from the log files.

    Raises:
        DataError: the file is damaged or not readable.
    """
    path = folder / JSON
    if not path.exists():
        return _record_from_logs(folder)
    try:
        record = RunRecord.from_json(json.loads(path.read_text(encoding="utf-8")), str(path))
    except (OSError, ValueError, DataError) as error:
        raise DataError(f"{path} cannot be read ({error}); delete it to use the log files instead") from error
    return record if record.source == "run" else _record_from_logs(folder)  # the run may have continued


def _record_from_logs(folder: Path) -> RunRecord:
    """Return what the log files contain. The x values of metrics are the steps in the log: epochs or iterations."""
    record = read_log(folder)
    for line in _json_lines(folder / "vis_data" / "scalars.json"):
        x = line.get("iter", line.get("step"))
        if not isinstance(x, int):
            continue
        training = "iter" in line
        record.iteration = max(record.iteration, x) if training else record.iteration
        record.epoch = max(record.epoch, line.get("epoch", 1) - 1) if training else record.epoch
        for key, value in line.items():
            name = key.removeprefix("train/").removeprefix("val/")
            if name in ("step", "iter", "epoch") or not (value is None or is_real(value)):
                continue
            if training or name not in ("time", "data_time"):
                # LocalVisBackend writes NaN and infinity as null.
                curve = record.curves.setdefault(f"{'train' if training else 'val'}/{name}", Curve())
                curve.add(x, [float("nan") if value is None else value])
    return record


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in a file; damaged lines, such as an incomplete last line, are skipped."""
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            yield line


def read_log(folder: Path) -> RunRecord:
    """Return a record with the start, duration, environment, messages and last error in the log of a run folder."""
    record = RunRecord(folder.name, "incomplete", source="logs")
    named = folder / f"{folder.name}.log"
    path = named if named.is_file() else next(iter(sorted(folder.glob("*.log"))), None)
    message, times = LogMessage("", "", ""), []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path else ():
        if match := _LINE.match(line):
            message = LogMessage(match[1], match[2], match[3])
            times.append(match[1])
            kept = message.level in ("WARNING", "ERROR", "CRITICAL") or message.text.startswith(
                "torch.compile: "
            )
            if kept and len(record.messages) < _MAX_MESSAGES:
                record.messages.append(message)
            if message.text.startswith("Environment: ") and not record.environment:
                entries = (entry.partition(" ") for entry in message.text[13:].split(", "))
                record.environment = {key: value for key, _, value in entries}
        else:
            message.text += f"\n{line}"
    if message.text.startswith(RUN_FAILED):
        record.status, record.error = "failed", message.text.partition("\n")[0].removeprefix(RUN_FAILED)
    if times:
        first, last = (datetime.strptime(time, "%Y/%m/%d %H:%M:%S") for time in (times[0], times[-1]))
        record.started, record.seconds = first.isoformat(" "), (last - first).total_seconds()
    return record


def flat_config(value: Any, path: str = "") -> dict[str, Any]:
    """Return the values in nested dicts and lists, keyed by dotted path, such as `train_dataloader.batch_size`.

    A list of plain values is one value. Anything that JSON cannot represent becomes a short string.
    """
    if isinstance(value, Mapping) and (value or not path):
        items = [(f"{path}.{key}" if path else str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple) and not all(
        isinstance(each, bool | int | float | str) for each in value
    ):
        items = [(f"{path}.{index}", item) for index, item in enumerate(value)]
    else:
        return {path: _plain(value)}
    return {key: leaf for name, item in items for key, leaf in flat_config(item, name).items()}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return str(value) if isinstance(value, Path) else f"<{type(value).__name__} object>"


@dataclass(frozen=True)
class RunRow:
    """One run in a list of runs. `record` is None if it cannot be read, and `problem` says why."""

    folder: Path
    record: RunRecord | None
    problem: str = ""

    @property
    def status(self) -> str:
        """The run's status, or `unreadable`."""
        return self.record.status if self.record else "unreadable"

    def value(self, key: str) -> Any:
        """Return the folder, the status, or a value of the record; see `RunRecord.value`."""
        if key in ("run", "folder", "status"):
            return self.status if key == "status" else str(self.folder)
        return self.record.value(key) if self.record else None


def find_runs(folder: Path) -> list[RunRow]:
    """Return a row for each run folder in `folder` and its subfolders, sorted by path.

    Raises:
        ConfigError: `folder` is not a folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; pass a folder that contains runs")
    return [_row(run) for run in sorted(_run_folders(folder))]


def _run_folders(folder: Path) -> Iterator[Path]:
    depth = len(folder.parts)
    for path, names, _ in os.walk(folder):
        current = Path(path)
        if _is_run(current):
            names.clear()
            yield current
        elif len(current.parts) - depth >= _MAX_DEPTH:
            names.clear()
        else:
            names[:] = [name for name in names if not name.startswith(".") and not name.endswith(".sharded")]


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in (JSON, "vis_data", f"{folder.name}.log"))


def _row(folder: Path) -> RunRow:
    try:
        return RunRow(folder, read_run(folder))
    except (DataError, OSError) as error:
        return RunRow(folder, None, str(error))


def run_folder(path: Path) -> Path:
    """Return the run folder for `path`, which is a run folder, a file in it, or a work_dir (its newest training run).

    Raises:
        ConfigError: `path` does not exist or contains no run.
    """
    folder = path.parent if path.is_file() else path
    if not folder.is_dir():
        raise ConfigError(
            f"{path} does not exist; pass a run folder, or run 'slipstream runs' to list all runs"
        )
    if _is_run(folder):
        return folder
    rows = [_row(child) for child in folder.iterdir() if child.is_dir() and _is_run(child)]
    if not rows:
        raise ConfigError(f"{path} contains no run; to search subfolders, use slipstream runs {path}")
    return max(rows, key=lambda row: (_trained(row), row.value("started") or "", row.folder.name)).folder


def _trained(row: RunRow) -> bool:
    """Return whether the run has trained; the curves may be those of an earlier run."""
    return row.record is not None and (row.record.phases.steps > 0 or row.record.source == "logs")
