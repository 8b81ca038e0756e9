"""`slipstream report`: write the report of a run, or a comparison of several runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from slipstream.cli.tables import printable
from slipstream.errors import ConfigError

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Write the report or the comparison, and print the path of each file."""
    from slipstream.report import read_run, run_folder, write_report
    from slipstream.report.comparison import MAX_RUNS, compare, comparison_csv, comparison_page
    from slipstream.report.page import page

    if len(args.runs) > MAX_RUNS:
        raise ConfigError(f"at most {MAX_RUNS} runs can be compared, not {len(args.runs)}; pass fewer runs")
    try:
        folders = [run_folder(Path(name)) for name in args.runs]
        records = [read_run(folder) for folder in folders]
    except OSError as error:
        raise ConfigError(f"cannot read '{error.filename}': {error.strerror or error}") from error
    compared = compare(list(zip(folders, records, strict=True)))
    if len(folders) == 1 and args.out is None:
        try:
            path = write_report(records[0], folders[0])
        except OSError as error:
            raise ConfigError(
                f"cannot write to {folders[0]}: {error.strerror}; choose a file with --out"
            ) from error
        print(printable(f"Wrote {path}"))
    else:
        text = page(records[0], folders[0]) if len(folders) == 1 else comparison_page(compared)
        _write(Path(args.out or "comparison.html"), text)
    if args.csv is not None:
        _write(Path(args.csv), comparison_csv(compared))
    return 0


def _write(path: Path, text: str) -> None:
    from slipstream.report import write_file

    try:
        write_file(path, text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose a different file") from error
    print(printable(f"Wrote {path}"))
