"""Measure step times and estimate the remaining time."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from slipstream.dataset.loading.loader import length
from slipstream.hooks.hook import Hook
from slipstream.registry import HOOKS

if TYPE_CHECKING:
    from slipstream.runner import Runner

# Number of steps after which the stored times are written to the message hub.
_MAX_UNREAD = 1000


@HOOKS.register_module()
class IterTimerHook(Hook):
    """Record the `time` and `data_time` of every batch and the `eta`, all in seconds.

    In training, `time` is the duration of the whole iteration, including hooks and checkpoints, and `data_time` is the
    time in the `data` phase of `runner.phases`. On an accelerator, the time of a single step covers only kernel
    launches, but means over a log interval are accurate.
    """

    reads_phases = True

    def __init__(self) -> None:
        self._last_time = self._data_time = 0.0
        self._waited = 0.0  # seconds that the run has waited for data so far
        # For each step since the last read: data_time, time and number of samples.
        self._unread: list[tuple[float, float, int]] = []
        self._spent = 0.0
        self._steps = self._samples = 0

    def before_train(self, runner: Runner) -> None:
        """Reset the total time, and the number of steps and samples."""
        self._spent, self._steps, self._samples = 0.0, 0, 0

    def _restart(self, runner: Runner) -> None:
        """Exclude the time so far from the next step's times."""
        self._last_time, self._waited = perf_counter(), runner.phases.total("data")

    def _before_epoch(self, runner: Runner, mode: str = "train") -> None:
        self._restart(runner)

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """Store how long the run waited for the batch."""
        waited = runner.phases.total("data")
        self._data_time, self._waited = waited - self._waited, waited

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Store the step's times; `read_logs` writes them to the message hub."""
        now = perf_counter()
        self._unread.append((self._data_time, now - self._last_time, runner.train_loop.step_samples))
        self._last_time = now
        if len(self._unread) == _MAX_UNREAD:
            self.read_logs(runner)

    def read_logs(self, runner: Runner) -> None:
        """Write the step times since the last call, the training speed and the remaining time to the message hub."""
        unread, self._unread = self._unread, []
        if unread:
            # Reading the losses waits for the device. Add this time to the last step, not to the next batch.
            now = perf_counter()
            unread[-1] = (unread[-1][0], unread[-1][1] + now - self._last_time, unread[-1][2])
            self._last_time = now
        for data_time, spent, samples in unread:
            runner.message_hub.update_scalar("train/data_time", data_time)
            runner.message_hub.update_scalar("train/time", spent)
            self._spent += spent
            self._samples += samples
        self._steps += len(unread)
        if (spent := sum(step[1] for step in unread)) > 0:
            speed = sum(step[2] for step in unread) / spent
            waiting = sum(step[0] for step in unread) / spent
            runner.message_hub.update_info(
                "recent_speed", {"images_per_second": speed, "waiting_for_data": waiting}, resumed=False
            )
        if unread and self._steps:
            remaining = runner.max_iters - runner.iter - 1
            eta = self._spent / self._steps * remaining if runner.knows_length else None
            runner.message_hub.update_info("eta", eta, resumed=False)

    def _before_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, mode: str = "train"
    ) -> None:
        runner.message_hub.update_scalar(f"{mode}/data_time", perf_counter() - self._last_time)

    def _after_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None, mode: str = "train"
    ) -> None:
        now = perf_counter()
        spent, self._last_time = now - self._last_time, now
        hub = runner.message_hub
        hub.update_scalar(f"{mode}/time", spent)
        loader = runner.val_dataloader if mode == "val" else runner.test_dataloader
        remaining = max((length(loader) or 0) - batch_idx - 1, 0)
        hub.update_info("eta", hub.get_scalar(f"{mode}/time").mean() * remaining, resumed=False)

    def after_val(self, runner: Runner) -> None:
        """Exclude the validation time from the next step's times."""
        self._restart(runner)

    def after_train(self, runner: Runner) -> None:
        """Log the training speed."""
        runner.read_logs()
        if self._steps:
            speed = self._samples / self._spent
            rate = f"{speed:.1f} images/s, including the first step"
            runner.logger.info(
                f"Trained for {self._steps} step{'s' * (self._steps != 1)} in {self._spent:.1f} s: {rate}"
            )
            runner.message_hub.update_info("images_per_second", speed, resumed=False)


@HOOKS.register_module()
class DistSamplerSeedHook(Hook):
    """A no-op hook, kept for compatibility with MMEngine configurations.

    This hook is not needed, because the loops set the epoch of every sampler.
    """
