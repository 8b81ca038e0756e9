"""`slipstream report`: write the report of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from slipstream.cli.tables import printable
from slipstream.errors import ConfigError

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
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
