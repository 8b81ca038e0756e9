"""Save a checkpoint and stop when any rank receives a signal."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from slipstream.dist import barrier
from slipstream.hooks.hook import Hook
from slipstream.preemption import CHECKPOINT_NAME, Interrupted, Preempted, Preemption
from slipstream.registry import HOOKS

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["PreemptionHook"]


@HOOKS.register_module()
class PreemptionHook(Hook):
    """On SIGTERM, SIGINT, SIGHUP, SIGUSR1 or SIGUSR2, save a checkpoint within the next few steps and stop.

    All ranks stop after the same step. A run with `resume=True` continues from this checkpoint, `preempted.pth`. The
    hook raises `Preempted` (after SIGINT, its subclass `Interrupted`), which makes Python exit with status 75. A second
    signal terminates the process without saving.
    """

    priority = "LOWEST"
    runs_last = True

    def __init__(self) -> None:
        self._preemption = Preemption()
        self._stack = ExitStack()

    def before_train(self, runner: Runner) -> None:
        """Start handling signals."""
        self.release(runner)
        self._preemption = self._stack.enter_context(Preemption())

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Save and stop if a rank has received a signal."""
        if not self._preemption.requested():
            return
        name = f"{CHECKPOINT_NAME}.pth"
        runner.save_checkpoint(runner.work_dir, name, by_epoch=False, mark_last=True)
        barrier()  # launchers kill the other processes when the first one exits
        signal_name = self._preemption.signal
        runner.logger.info(
            f"{signal_name} received: the state after iteration {runner.iter + 1} is saved in {runner.work_dir}; to "
            "continue, run the same command with resume=True"
        )
        raise Interrupted if signal_name == signal.Signals.SIGINT.name else Preempted

    def after_skipped_iter(self, runner: Runner, batch_idx: int) -> None:
        """Save and stop if a rank has received a signal."""
        self.after_train_iter(runner, batch_idx)

    def after_train(self, runner: Runner) -> None:
        """Restore the signal handlers."""
        self.release(runner)

    def release(self, runner: Runner) -> None:
        """Restore the signal handlers."""
        self._stack.close()
