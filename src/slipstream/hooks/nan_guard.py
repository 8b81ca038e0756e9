"""Handle non-finite losses and gradients (stop, skip the step or roll back), and report the faulty module."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal

from slipstream.dist import get_rank
from slipstream.errors import NonFiniteLossError
from slipstream.hooks.checkpoint import warn_without_checkpoints
from slipstream.hooks.hook import Hook
from slipstream.model import unwrap_model
from slipstream.optim import OptimWrapperDict
from slipstream.registry import HOOKS
from slipstream.speed.nan_guard import Locator, NanGuardOptions, StepGuard

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["NanGuardHook"]

_MAX_LOGGED = 10
"""Maximum number of skipped batches whose samples are logged per log interval."""


@HOOKS.register_module()
class NanGuardHook(Hook):
    """Stop training or roll back if a loss is not finite, or skip each step whose loss or gradient is not finite.

    Args:
        action, locate, max_skipped, max_rollbacks, skip_before: see `NanGuardOptions`.
    """

    def __init__(
        self,
        action: Literal["stop", "skip", "rollback"] = "stop",
        locate: bool = False,
        max_skipped: int = 50,
        max_rollbacks: int = 3,
        skip_before: int = 0,
    ) -> None:
        self.options = NanGuardOptions(action, locate, max_skipped, max_rollbacks, skip_before)
        self.guard: StepGuard | None = None
        self.locator: Locator | None = None
        self._cleanup = ExitStack()
        self.skipped = 0
        """Number of skipped steps, as of the last call to `read_logs`."""

    def before_train(self, runner: Runner) -> None:
        """Warn if the run does not save a checkpoint to roll back to."""
        if self.options.action == "rollback":
            warn_without_checkpoints(runner, "nan_guard")

    def before_run(self, runner: Runner) -> None:
        """Install the guard and the locator before the model is compiled."""
        optim, meter, model = runner.optim_wrapper, runner.meter, unwrap_model(runner.model)
        if optim is None:
            return
        if isinstance(optim, OptimWrapperDict) and self.options.action == "skip":
            raise self.config_error(
                "'skip' of nan_guard supports only one optimizer, but this run has several; use 'stop' or 'rollback'",
                "action",
            )
        self.release(runner)
        if self.options.action == "skip":
            optim.guard = self.guard = StepGuard(model, runner.device, self.options.max_skipped)
            meter.tolerant = True
            self._cleanup.callback(setattr, optim, "guard", None)
            self._cleanup.callback(setattr, meter, "tolerant", False)
        elif self.options.action == "rollback":
            options, rollback = self.options, runner.rollback
            rollback.enable(NonFiniteLossError, options.max_rollbacks, options.skip_before)
            meter.agree = rollback.agree
            self._cleanup.callback(rollback.disable, NonFiniteLossError)
            self._cleanup.callback(setattr, meter, "agree", None)
        if self.options.locate:
            self.locator = Locator(model)
            self._cleanup.callback(self.locator.close)
        if self.locator is not None and self.options.action != "skip":
            meter.locate = self.locator.report
            self._cleanup.callback(setattr, meter, "locate", None)

    def read_logs(self, runner: Runner) -> None:
        """Log the number of steps skipped since the last call, and the module that produced the non-finite value."""
        if self.guard is None:
            return
        try:
            skipped = self.guard.read()
        except NonFiniteLossError as error:
            if self.locator is not None:
                error.add_note(self.locator.report())
            raise
        self._log_samples(runner)
        self.skipped += skipped
        runner.message_hub.update_scalar("train/skipped_steps", self.skipped)
        if skipped:
            report = f". {self.locator.report()}" if self.locator is not None else ""
            runner.logger.warning(
                f"Skipped {skipped} step{'s' if skipped > 1 else ''} with a non-finite loss or gradient, up to "
                f"iteration {runner.iter + 1}{report}"
            )

    def _log_samples(self, runner: Runner) -> None:
        """For each step whose loss was not finite, log the samples in this rank's batch."""
        dropped, runner.meter.dropped = runner.meter.dropped, []
        for iteration in dropped[:_MAX_LOGGED]:
            samples = runner.rollback.describe(iteration)
            batch = f"; its batch contains {samples}" if samples else ""
            text = f"The loss at iteration {iteration} is not finite{batch}"
            if get_rank() == 0:
                runner.logger.warning(text)
            else:  # ranks other than 0 print only errors
                runner.logger.error(f"Rank {get_rank()}: {text}")
        if len(dropped) > _MAX_LOGGED:
            count = len(dropped) - _MAX_LOGGED
            losses = "loss at 1 more iteration is" if count == 1 else f"losses at {count} more iterations are"
            runner.logger.warning(f"The {losses} not finite")

    def after_rollback(self, runner: Runner) -> None:
        """Discard the guard and locator results for the steps that will be repeated."""
        runner.meter.dropped = []
        if self.guard is not None:
            self.guard.reset()
        if self.locator is not None:
            self.locator.report()

    def release(self, runner: Runner) -> None:
        """Remove the guard and the locator."""
        self._cleanup.close()
        self.guard = self.locator = None
