"""Read and write a report's files, `report.json` and `report.html`, in a run folder."""

from __future__ import annotations

import json
from pathlib import Path

from slipstream.errors import DataError
from slipstream.files import write_text
from slipstream.report.log_files import check_file, record_from_logs
from slipstream.report.parsing import parse_json
from slipstream.report.record import RunRecord

__all__ = ["HTML", "JSON", "read_run", "write_file", "write_report"]

JSON, HTML = "report.json", "report.html"
_MAX_BYTES = 64 * 2**20
"""Size limit of `report.json`, in bytes; the largest reports are a few MB."""


def read_run(folder: Path) -> RunRecord:
    """Return the record of a run, read from `report.json` or, if this file does not exist, from the log files.

    If the record's status is `incomplete`, the log files are read instead, because the run may have continued.

    Raises:
        DataError: a file is damaged, is not a regular file, or is not readable. The message names the file and
            suggests a remedy.
    """
    path = folder / JSON
    check_file(path)
    if not path.exists():
        return record_from_logs(folder)
    try:
        record = _read(path)
    except DataError as error:
        raise DataError(f"{error}. Delete {path} to rebuild the report from the log files") from error
    return record_from_logs(folder) if record.status == "incomplete" else record


def _read(path: Path) -> RunRecord:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DataError(f"{path} is larger than {_MAX_BYTES // 2**20} MiB")
        data = parse_json(path.read_text(encoding="utf-8"), allow_nan=False)
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} cannot be read: {error}") from error
    return RunRecord.from_json(data, str(path))


def write_report(record: RunRecord, folder: Path) -> Path:
    """Write `report.json` and `report.html` to a run folder, each atomically, and return the path of the page."""
    from slipstream.report.page import page

    write_file(folder / JSON, json.dumps(record.to_json(), allow_nan=False, indent=None) + "\n")
    write_file(folder / HTML, page(record, folder))
    return folder / HTML


def write_file(path: Path, text: str) -> None:
    """Write a text file atomically."""
    # Text from a run may contain characters that UTF-8 cannot represent, for example from a file name.
    write_text(path, text, errors="replace")
