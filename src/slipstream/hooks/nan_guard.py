"""Stop training at a non-finite loss or skip the step, and report the faulty module."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal

from slipstream.errors import NonFiniteLossError
from slipstream.hooks.hook import Hook
from slipstream.model import unwrap_model
from slipstream.optim import OptimWrapperDict
from slipstream.registry import HOOKS
from slipstream.speed.nan_guard import Locator, NanGuardOptions, StepGuard

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["NanGuardHook"]


@HOOKS.register_module()
class NanGuardHook(Hook):
    """Stop training if a loss is not finite, or skip each step whose loss or gradient is not finite.

    Args:
        action, locate, max_skipped: see `NanGuardOptions`.
    """

    def __init__(
        self, action: Literal["stop", "skip"] = "stop", locate: bool = False, max_skipped: int = 50
    ) -> None:
        self.options = NanGuardOptions(action, locate, max_skipped)
        self.guard: StepGuard | None = None
        self.locator: Locator | None = None
        self._cleanup = ExitStack()
        self.skipped = 0
        """Number of skipped steps, as of the last call to `read_logs`."""

    def before_run(self, runner: Runner) -> None:
        """Install the guard and the locator before the model is compiled."""
        optim, meter, model = runner.optim_wrapper, runner.meter, unwrap_model(runner.model)
        if optim is None:
            return
        self.release(runner)
        if self.options.locate:
            self.locator = Locator(model)
            self._cleanup.callback(self.locator.close)
        if self.options.action == "skip":
            if isinstance(optim, OptimWrapperDict):
                raise self.config_error(
                    "'skip' of nan_guard supports only one optimizer, but this run has several; use 'stop'",
                    "action",
                )
            optim.guard = self.guard = StepGuard(model, runner.device, self.options.max_skipped)
            meter.tolerant = True
            self._cleanup.callback(setattr, optim, "guard", None)
            self._cleanup.callback(setattr, meter, "tolerant", False)
        elif self.locator is not None:
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
        self.skipped += skipped
        runner.message_hub.update_scalar("train/skipped_steps", self.skipped)
        if skipped:
            report = f". {self.locator.report()}" if self.locator is not None else ""
            runner.logger.warning(
                f"Skipped {skipped} step{'s' if skipped > 1 else ''} with a non-finite loss or gradient, up to "
                f"iteration {runner.iter + 1}{report}"
            )

    def release(self, runner: Runner) -> None:
        """Remove the guard and the locator."""
        self._cleanup.close()
        self.guard = self.locator = None
