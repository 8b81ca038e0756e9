"""Save a checkpoint and stop when any rank receives a signal."""

from __future__ import annotations

import re
import signal
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from slipstream.dist import barrier
from slipstream.errors import ConfigError
from slipstream.hooks.hook import Hook
from slipstream.preemption import CHECKPOINT_NAME, TIME_LIMIT, Interrupted, Preempted, Preemption
from slipstream.registry import HOOKS
from slipstream.typecheck import Positive, matches

if TYPE_CHECKING:
    from slipstream.runner import Runner


@HOOKS.register_module()
class PreemptionHook(Hook):
    """On SIGTERM, SIGINT, SIGHUP, SIGUSR1 or SIGUSR2, save a checkpoint within the next few steps and stop.

    All ranks stop after the same step. A run with `resume=True` continues from this checkpoint, `preempted.pth`. The
    hook raises `Preempted` (after SIGINT, its subclass `Interrupted`), which makes Python exit with status 75. Signals
    are handled from the start of `Runner.train` until the last checkpoint is written. If a signal arrives before the
    first step, no checkpoint is saved; if it arrives after the last step, the run ends normally. A second signal, at
    least one second after the first, terminates the process without saving.

    Args:
        max_time: time limit of a call to `Runner.train`: a number of seconds, a `timedelta`, or a string such as
            `"12:00:00"` or `"01:12:00:00"` (days, hours, minutes and seconds). After the limit, all ranks save
            `preempted.pth` after the same step, and training ends normally. A resumed run has the whole time again.

    Raises:
        ConfigError: `max_time` is invalid.
    """

    priority = "LOWEST"
    runs_last = True

    def __init__(self, max_time: float | str | timedelta | None = None) -> None:
        self._max_seconds = None if max_time is None else _seconds(max_time)
        self._preemption = Preemption()

    def handle_signals(self) -> Preemption:
        """Return a context manager within which the hook handles signals; the Runner enters it for the whole run."""
        self._preemption = Preemption(self._max_seconds)
        return self._preemption

    def before_train(self, runner: Runner) -> None:
        """Stop if a rank has already received a signal."""
        if self._preemption.requested() and self._preemption.signal != TIME_LIMIT:
            self._stop(runner, "no steps were run, so there is nothing to save; run the same command again")

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Save and stop if a rank has received a signal or the time limit is reached."""
        if not self._preemption.requested():
            return
        by_time = self._preemption.signal == TIME_LIMIT
        if by_time and self.is_last_train_iter(runner):
            return
        name = f"{CHECKPOINT_NAME}.pth"
        runner.save_checkpoint(runner.work_dir, name, by_epoch=False, mark_last=True)
        state = f"the state after iteration {runner.iter + 1} was saved in {runner.work_dir}"
        if by_time:
            runner.train_loop.stop_now = True
            runner.logger.info(f"The time limit was reached: {state}; to continue, set resume=True")
            return
        self._stop(runner, f"{state}; to continue, run the same command with resume=True", runner.iter + 1)

    def _stop(self, runner: Runner, text: str, iteration: int | None = None) -> None:
        barrier()  # launchers kill the other processes when the first one exits
        signal_name = self._preemption.signal
        runner.logger.info(f"{signal_name} received: {text}")
        raise (Interrupted if signal_name == signal.Signals.SIGINT.name else Preempted)(iteration)


def _seconds(max_time: float | str | timedelta) -> float:
    """Return a time limit in seconds."""
    if isinstance(max_time, timedelta):
        max_time = max_time.total_seconds()
    elif isinstance(max_time, str) and re.fullmatch(r"(\d+:){2,3}\d+", max_time):
        units = zip(reversed(max_time.split(":")), (1, 60, 3600, 86400), strict=False)
        max_time = float(sum(int(number) * unit for number, unit in units))
    if not matches(max_time, Positive):
        message = f"must be a positive number of seconds, a timedelta or 'HH:MM:SS', not {max_time!r}"
        raise ConfigError(message, "max_time")
    return float(max_time)
