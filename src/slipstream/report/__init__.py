"""Reports on training runs: a run's record, its HTML page, the comparison of several runs, and the list of runs."""

from slipstream.report.curve import Curve
from slipstream.report.files import read_run, write_file, write_report
from slipstream.report.find import find_runs, run_folder
from slipstream.report.record import PhaseSplit, RunRecord

__all__ = [
    "Curve",
    "PhaseSplit",
    "RunRecord",
    "find_runs",
    "read_run",
    "run_folder",
    "write_file",
    "write_report",
]
