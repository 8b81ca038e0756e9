"""Carry out `nan_guard`: skip the steps that are not finite, or stop and say where it happened."""

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
    """Skip training steps whose loss or gradients are not finite, or stop and name the module.

    Args:
        action, locate, max_skipped: those of `NanGuardOptions`.
    """

    def __init__(
        self, action: Literal["stop", "skip"] = "stop", locate: bool = False, max_skipped: int = 50
    ) -> None:
        self.how = NanGuardOptions(action, locate, max_skipped)
        self.guard: StepGuard | None = None
        self.locator: Locator | None = None
        self._undo = ExitStack()
        self.skipped = 0
        """Steps skipped in this training, as far as they have been read."""

    def before_run(self, runner: Runner) -> None:
        """Put guard and locator in their places, before anything is compiled."""
        optim, meter, model = runner.optim_wrapper, runner.meter, unwrap_model(runner.model)
        if optim is None:
            return
        if isinstance(optim, OptimWrapperDict) and self.how.action == "skip":
            raise self.wrong(
                "'skip' serves one optimizer, and this model trains with several: take 'stop'", "action"
            )
        self.close()
        if self.how.action == "skip":
            optim.guard = self.guard = StepGuard(model, runner.device, self.how.max_skipped)
            meter.tolerant = True
            self._undo.callback(setattr, optim, "guard", None)
            self._undo.callback(setattr, meter, "tolerant", False)
        if self.how.locate:
            self.locator = Locator(model)
            self._undo.callback(self.locator.close)
        if self.locator is not None and self.how.action == "stop":
            meter.locate = self.locator.report
            self._undo.callback(setattr, meter, "locate", None)

    def read_logs(self, runner: Runner) -> None:
        """Log the steps that were skipped since the last time, and where they broke."""
        if self.guard is None:
            return
        try:
            new = self.guard.read()
        except NonFiniteLossError as error:
            if self.locator is not None:
                error.add_note(self.locator.report())
            raise
        self.skipped += new
        runner.message_hub.update_scalar("train/skipped_steps", self.skipped)
        if new:
            where = f". {self.locator.report()}" if self.locator is not None else ""
            runner.logger.warning(
                f"Skipped {new} step{'s' if new > 1 else ''} by iteration {runner.iter + 1}, whose loss or gradients "
                f"were not finite{where}"
            )

    def after_run(self, runner: Runner) -> None:
        """End with the run."""
        self.close()

    def close(self) -> None:
        """Take everything out of the model, the optimizer wrapper and the meter, also after a run that failed."""
        self._undo.close()
        self.guard = self.locator = None
