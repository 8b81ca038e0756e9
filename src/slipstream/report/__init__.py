"""Reports on training runs: a run's record, its HTML page, and the list of runs."""

from slipstream.report.files import find_runs, read_run, run_folder, write_report
from slipstream.report.record import Curve, PhaseSplit, RunRecord

__all__ = ["Curve", "PhaseSplit", "RunRecord", "find_runs", "read_run", "run_folder", "write_report"]
