"""Read a run's log files: warnings from the log, and curves from the JSON lines written by `LocalVisBackend`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from slipstream.errors import DataError
from slipstream.logging import RUN_FAILED
from slipstream.report.curve import Curve
from slipstream.report.parsing import parse_json
from slipstream.report.record import LogMessage, RunRecord
from slipstream.typecheck import is_real

__all__ = ["MAX_MESSAGES", "LogFile", "check_file", "log_file", "read_log", "record_from_logs"]

MAX_MESSAGES = 200
"""Maximum number of warnings and errors to keep."""
_MAX_MESSAGE_LENGTH = 4000
"""Maximum number of characters to keep of each message."""
_RECORD = re.compile(r"^(\d{4}/\d\d/\d\d \d\d:\d\d:\d\d) - (DEBUG|INFO|WARNING|ERROR|CRITICAL) - (.*)$")
_ENVIRONMENT = {
    "python", "platform", "torch", "numpy", "device", "device_name", "cuda", "cudnn", "cpu_threads", "world_size",
    "backend",
}  # fmt: skip
"""The entries of the log line `Environment` that a report contains."""
_SCALARS = "scalars.json"
_COUNTERS = ("step", "iter", "epoch")
_EPOCH = re.compile(r"^Epoch\(train\)\s+\[\s*\d+\]")


@dataclass
class LogFile:
    """The contents of a log file that are used in a report."""

    started: str = ""
    """Local time of the first line, `YYYY-MM-DD HH:MM:SS`."""
    seconds: float = 0.0
    """Time between the first and the last line."""
    messages: list[LogMessage] = field(default_factory=list)
    """The warnings, the errors and the torch.compile summary."""
    dropped: int = 0
    """Number of messages omitted from `messages`."""
    environment: dict[str, str] = field(default_factory=dict)
    by_epoch: bool = False
    """Whether a training line contains an epoch number."""
    error: str = ""
    """The error that ended the run, if it is the last record."""


def log_file(folder: Path) -> Path | None:
    """Return the log file that is named after the run folder.

    If this file does not exist, return the folder's only log file, or None if there is not exactly one.
    """
    named_log = folder / f"{folder.name}.log"
    if named_log.is_file():
        return named_log
    logs = sorted(folder.glob("*.log"))
    return logs[0] if len(logs) == 1 else None


def read_log(path: Path) -> LogFile:
    """Parse a log file; a missing file is treated as empty.

    A line without a time and a level continues the preceding record, which is limited to 100 lines.
    """
    log = LogFile()
    first = last = None
    for time, level, text in _records(path):
        log.error = text.partition("\n")[0].removeprefix(RUN_FAILED) if text.startswith(RUN_FAILED) else ""
        if (timestamp := _parse_time(time)) is not None:
            first, last = first or timestamp, timestamp
        if level == "INFO" and text.startswith("Environment: "):
            log.environment = log.environment or _environment(text)
        log.by_epoch = log.by_epoch or (level == "INFO" and _EPOCH.match(text) is not None)
        if level in ("WARNING", "ERROR", "CRITICAL") or text.startswith("torch.compile: "):
            if len(log.messages) < MAX_MESSAGES:
                log.messages.append(LogMessage(time, level, text[:_MAX_MESSAGE_LENGTH]))
            else:
                log.dropped += 1
    if first is not None and last is not None:
        log.started = first.isoformat(" ")
        log.seconds = max((last - first).total_seconds(), 0.0)
    return log


def _parse_time(text: str) -> datetime | None:
    """Return the time of a line, or None if the date does not exist, such as 2026/02/30."""
    try:
        return datetime.fromisoformat(text.replace("/", "-"))
    except ValueError:
        return None


def _records(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the time, level and text of each record; the text may span several lines."""
    time = level = ""
    lines: list[str] = []
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if match := _RECORD.match(line.rstrip("\n")):
                    if lines:
                        yield time, level, "\n".join(lines)
                    time, level, lines = match[1], match[2], [match[3]]
                elif lines and len(lines) < 100:
                    lines.append(line.rstrip("\n"))
    except OSError:
        return
    if lines:
        yield time, level, "\n".join(lines)


def _environment(text: str) -> dict[str, str]:
    entries = (entry.partition(" ") for entry in text.removeprefix("Environment: ").split(", "))
    return {key: value for key, _, value in entries if key in _ENVIRONMENT}


def record_from_logs(folder: Path) -> RunRecord:
    """Return a record with the contents of a run folder's log files.

    The status is `failed` if the log ends with an error, otherwise `incomplete`. The x values of metrics are the
    steps in the log, which are epochs or iterations.

    Raises:
        DataError: a log file is not a regular file, or is not readable.
    """
    check_file(folder / f"{folder.name}.log")
    check_file(folder / "vis_data" / _SCALARS)
    path = log_file(folder)
    log = read_log(path) if path is not None else LogFile()
    record = RunRecord(
        name=folder.name,
        source="logs",
        status="failed" if log.error else "incomplete",
        error=log.error,
        started=log.started,
        seconds=log.seconds,
        environment=log.environment,
        by_epoch=log.by_epoch,
        messages=log.messages,
        dropped_messages=log.dropped,
    )
    for line in _json_lines(folder / "vis_data"):
        _add_line(record, line)
    return record


def check_file(path: Path) -> None:
    """Check that a path is a readable file or does not exist.

    Raises:
        DataError: the path is not a regular file, or is not readable.
    """
    if not os.path.lexists(path):
        return
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "not a file"
        raise DataError(f"{path} is {kind}, but a run stores a file with this name; remove or rename it")
    if not os.access(path, os.R_OK):
        raise DataError(f"{path} is not readable; change its permissions")


def _json_lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects in the scalars file; damaged lines, such as an incomplete last line, are skipped."""
    path = folder / _SCALARS
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for text in file:
                try:
                    line = parse_json(text)
                except ValueError:
                    continue
                if isinstance(line, dict):
                    yield line
    except OSError:
        return


def _add_line(record: RunRecord, line: dict[str, Any]) -> None:
    iteration, step, epoch = (_count(line.get(key)) for key in ("iter", "step", "epoch"))
    x = step if iteration is None else iteration
    if x is None:
        return
    if iteration is not None:
        record.iteration = max(record.iteration, iteration)
        record.epoch = max(record.epoch, (epoch or 1) - 1)
    for key, value in line.items():
        name = key.removeprefix("train/").removeprefix("val/")
        if name in _COUNTERS or not (value is None or is_real(value)):
            continue
        if name == "memory":
            name = "memory/device_peak_mib"
        elif iteration is not None:
            name = f"train/{name}"
        elif name not in ("time", "data_time"):
            name = f"val/{name}"
        else:
            continue
        # LocalVisBackend writes NaN and infinity as null.
        record.curves.setdefault(name, Curve()).add(x, [float("nan") if value is None else float(value)])


def _count(value: Any) -> int | None:
    """Return `value` if it is a valid number of steps or epochs, otherwise None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else None
