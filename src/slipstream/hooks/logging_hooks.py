"""Hooks for log lines, scalars and the progress bar."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from slipstream.hooks.hook import Hook, validation_count
from slipstream.hooks.live_values import LiveValues
from slipstream.logging import ProgressBar
from slipstream.registry import HOOKS
from slipstream.typecheck import PositiveInt, check

if TYPE_CHECKING:
    from slipstream.runner import Runner


@HOOKS.register_module()
class LoggerHook(Hook):
    """Every `interval` steps, read the losses, log a line and pass the scalars to the visualizer.

    Args:
        interval: number of steps between log lines.
        ignore_last: do not log the last steps of an epoch if there are fewer than `interval` of them, unless the
            whole epoch is shorter than `interval`. By default, the last step of an epoch is logged, unlike in MMEngine.
        interval_exp_name: number of steps between log lines that contain the experiment name.
        log_metric_by_epoch: plot validation metrics over epochs (True) or over steps (False).
    """

    priority = "BELOW_NORMAL"

    def __init__(
        self,
        interval: PositiveInt = 10,
        ignore_last: bool = False,
        interval_exp_name: PositiveInt = 1000,
        log_metric_by_epoch: bool = True,
    ) -> None:
        for name, value in {"interval": interval, "interval_exp_name": interval_exp_name}.items():
            check(value, PositiveInt, name)
        self.interval = interval
        self.ignore_last = ignore_last
        self.interval_exp_name = interval_exp_name
        self.log_metric_by_epoch = log_metric_by_epoch

    def before_train(self, runner: Runner) -> None:
        """Store whether training is epoch-based; disable `ignore_last` if epochs are shorter than `interval`."""
        self._by_epoch = runner.by_epoch
        self._ignore_last = self.ignore_last
        if self._by_epoch and (runner.train_loop.epoch_length or self.interval) < self.interval:
            self._ignore_last = False

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Log the losses if a log line is due after this step."""
        step = batch_idx if self._by_epoch else runner.iter
        if (step + 1) % self.interval and (self._ignore_last or not self._is_last(runner, batch_idx)):
            return
        with runner.phases.during("logging"):
            if self.every_n_train_iters(runner, self.interval_exp_name):
                runner.logger.info(f"Exp name: {runner.experiment_name}")
            runner.read_logs()
            tag, line = runner.log_processor.get_log_after_iter(runner, batch_idx, "train")
            runner.logger.info(line)
            runner.visualizer.add_scalars(tag, step=runner.iter + 1, file_path=runner.json_log)

    def after_train_epoch(self, runner: Runner) -> None:
        """Log the last steps of an epoch whose length was not known in advance, and the epoch's mean losses."""
        known = not self._by_epoch or runner.train_loop.epoch_length is not None
        with runner.phases.during("logging"):
            if not (known or self._ignore_last or runner.inner_iter % self.interval == 0):
                runner.read_logs()
                tag, line = runner.log_processor.get_log_after_iter(runner, runner.inner_iter - 1, "train")
                tag["iter"] = runner.iter  # the last step is already counted
                runner.logger.info(line)
                runner.visualizer.add_scalars(tag, step=runner.iter, file_path=runner.json_log)
            if means := runner.message_hub.get_info("epoch_means"):
                values = "  ".join(f"{name}: {mean:.4f}" for name, mean in means.items())
                runner.logger.info(f"Epoch(train) [{runner.epoch + 1}] mean  {values}")

    def _is_last(self, runner: Runner, batch_idx: int) -> bool:
        if self._by_epoch:
            return bool(batch_idx + 1 == runner.train_loop.epoch_length)
        return self.is_last_train_iter(runner)

    def _after_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None, mode: str = "train"
    ) -> None:
        """Log the progress of validation or testing."""
        if self.every_n_inner_iters(batch_idx, self.interval):
            runner.logger.info(runner.log_processor.get_log_after_iter(runner, batch_idx, mode)[1])

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Log the validation metrics."""
        tag, line = runner.log_processor.get_log_after_epoch(runner, runner.val_loop.batches, "val")
        runner.logger.info(line)
        step, _ = validation_count(runner, self.log_metric_by_epoch and runner.by_epoch)
        runner.visualizer.add_scalars(tag, step=step, file_path=runner.json_log)

    def after_test_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Log the test metrics."""
        tag, line = runner.log_processor.get_log_after_epoch(
            runner, runner.test_loop.batches, "test", with_non_scalar=True
        )
        runner.logger.info(line)
        runner.visualizer.add_scalars(tag, step=runner.iter, file_path=runner.json_log)


@HOOKS.register_module()
class ProgressBarHook(Hook):
    """Show a progress bar below the log lines. The Runner registers this hook on rank 0 if the output is a terminal.

    In addition to the progress, the bar shows the loss, the learning rate, a metric, the training speed, and the
    fraction of time spent waiting for data. These values are updated when the Runner reads the losses, and after
    each validation run.
    """

    priority = "LOWEST"

    def __init__(self) -> None:
        self._bar: ProgressBar | None = None
        self._values = LiveValues()
        self._text = ""

    def before_train(self, runner: Runner) -> None:
        """Show the bar."""
        self._bar = ProgressBar(runner.logger.console)
        self._bar.start(runner.max_iters if runner.knows_length else None, "training")
        self._values, self._text = LiveValues(), ""

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Update the bar."""
        if self._bar is not None:
            with suppress(OSError):  # the terminal may be closed
                self._bar.update(runner.iter + 1, self._text)

    def read_logs(self, runner: Runner) -> None:
        """Read the latest values."""
        names = {"images/s": "{} images/s", "waiting for data": "{} waiting for data"}
        rows = self._values.rows(runner) if self._bar is not None else []
        self._text = "  ".join(names.get(name, f"{name} {{}}").format(value) for name, value in rows)

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Read the metric from a validation run."""
        if self._bar is not None:
            self._values.add_metrics(runner, metrics)
            self.read_logs(runner)

    def after_train(self, runner: Runner) -> None:
        """Remove the bar."""
        self.release(runner)

    def release(self, runner: Runner) -> None:
        """Remove the bar."""
        if self._bar is not None:
            with suppress(OSError):  # the terminal may be closed
                self._bar.stop()
            self._bar = None
