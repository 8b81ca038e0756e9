"""Save a checkpoint and stop when any rank receives a signal."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from slipstream.dist import barrier
from slipstream.hooks.hook import Hook
from slipstream.preemption import CHECKPOINT_NAME, Interrupted, Preempted, Preemption
from slipstream.registry import HOOKS

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
    """

    priority = "LOWEST"
    runs_last = True

    def __init__(self) -> None:
        self._preemption = Preemption()

    def handle_signals(self) -> Preemption:
        """Return a context manager within which the hook handles signals; the Runner enters it for the whole run."""
        self._preemption = Preemption()
        return self._preemption

    def before_train(self, runner: Runner) -> None:
        """Stop if a rank has already received a signal."""
        if self._preemption.requested():
            self._stop(runner, "no steps were run, so there is nothing to save; run the same command again")

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Save and stop if a rank has received a signal."""
        if not self._preemption.requested():
            return
        name = f"{CHECKPOINT_NAME}.pth"
        runner.save_checkpoint(runner.work_dir, name, by_epoch=False, mark_last=True)
        state = f"the state after iteration {runner.iter + 1} was saved in {runner.work_dir}"
        self._stop(runner, f"{state}; to continue, run the same command with resume=True", runner.iter + 1)

    def _stop(self, runner: Runner, text: str, iteration: int | None = None) -> None:
        barrier()  # launchers kill the other processes when the first one exits
        signal_name = self._preemption.signal
        runner.logger.info(f"{signal_name} received: {text}")
        raise (Interrupted if signal_name == signal.Signals.SIGINT.name else Preempted)(iteration)
