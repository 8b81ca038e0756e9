"""Write a report at the end of each run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.hooks.hook import Hook
from slipstream.registry import HOOKS
from slipstream.typecheck import Positive, check

if TYPE_CHECKING:
    from slipstream.hooks.run_report import RunReport
    from slipstream.runner import Runner

__all__ = ["ReportHook"]


@HOOKS.register_module()
class ReportHook(Hook):
    """Write `report.json` and `report.html` to the run's log folder at the end of the run, even after an error.

    The hook does not add a device synchronization to training steps. It copies values from the message hub when the
    Runner reads the losses, and after each evaluation. The report is described in docs/report.md.

    Args:
        peak_tflops: the peak throughput of the device in 10^12 operations per second at the run's precision, used to
            compute the model FLOPs utilization. Default: the value in `slipstream.speed.flops.PEAKS`.
        probe_workers: at the end of a run that waited for data, spend a few seconds measuring how fast batches load
            with different numbers of workers. Worker processes read samples from the training dataset.
    """

    priority = "VERY_LOW"
    reads_phases = True

    def __init__(self, peak_tflops: Positive | None = None, probe_workers: bool = False) -> None:
        check(peak_tflops, Positive | None, "peak_tflops")
        check(probe_workers, bool, "probe_workers")
        self._peak_tflops, self._probe_workers = peak_tflops, probe_workers
        self._created: RunReport | None = None

    @property
    def _report(self) -> RunReport:
        if self._created is None:
            # Imported here, because it is needed only during a run.
            from slipstream.hooks.run_report import RunReport

            self._created = RunReport(self._peak_tflops, self._probe_workers)
        return self._created

    def before_train(self, runner: Runner) -> None:
        """Store the start iteration, and skip the values that were loaded when the run was resumed."""
        self._report.before_train(runner)

    def after_rollback(self, runner: Runner) -> None:
        """Remove the values recorded after the checkpoint, because the run repeats these steps and evaluations."""
        self._report.after_rollback(runner)

    def read_logs(self, runner: Runner) -> None:
        """Add a point to each curve."""
        self._report.read_logs(runner)

    def before_val_epoch(self, runner: Runner) -> None:
        """Start selecting example predictions."""
        self._report.before_val_epoch(runner)

    def after_val_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Select example predictions of a classifier."""
        self._report.after_val_iter(batch_idx, data_batch, outputs)

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Add the metrics to their curves, and keep the confusion matrices and the example predictions."""
        self._report.after_val_epoch(runner, metrics)

    def after_test_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Add the metrics to their curves, and keep the confusion matrices."""
        self._report.after_test_epoch(runner, metrics)

    def release(self, runner: Runner) -> None:
        """Write the report."""
        self._report.write(runner)
