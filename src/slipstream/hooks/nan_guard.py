"""Skip training steps with a non-finite loss or gradient, or report the module that caused a non-finite loss."""

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
    """Skip training steps with a non-finite loss or gradient, or stop training at a non-finite loss.

    Args:
        action, locate, max_skipped: see `NanGuardOptions`.
    """

    def __init__(
        self, action: Literal["stop", "skip"] = "stop", locate: bool = False, max_skipped: int = 50
    ) -> None:
        self.options = NanGuardOptions(action, locate, max_skipped)
        self.guard: StepGuard | None = None
        self.locator: Locator | None = None
        self._undo = ExitStack()
        self.skipped = 0
        """Number of skipped steps, as of the last `read_logs`."""

    def before_run(self, runner: Runner) -> None:
        """Install the guard and the locator, before the model is compiled."""
        optim, meter, model = runner.optim_wrapper, runner.meter, unwrap_model(runner.model)
        if optim is None:
            return
        if isinstance(optim, OptimWrapperDict) and self.options.action == "skip":
            raise self.wrong(
                "'skip' supports only one optimizer, but this model has several; use 'stop'", "action"
            )
        self.close()
        if self.options.action == "skip":
            optim.guard = self.guard = StepGuard(model, runner.device, self.options.max_skipped)
            meter.tolerant = True
            self._undo.callback(setattr, optim, "guard", None)
            self._undo.callback(setattr, meter, "tolerant", False)
        if self.options.locate:
            self.locator = Locator(model)
            self._undo.callback(self.locator.close)
        if self.locator is not None and self.options.action == "stop":
            meter.locate = self.locator.report
            self._undo.callback(setattr, meter, "locate", None)

    def read_logs(self, runner: Runner) -> None:
        """Log the steps skipped since the last call and the module that caused them."""
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
                f"Skipped {new} step{'s' if new > 1 else ''} with a non-finite loss or gradient, up to iteration "
                f"{runner.iter + 1}{where}"
            )

    def after_run(self, runner: Runner) -> None:
        """Uninstall the guard and the locator."""
        self.close()

    def close(self) -> None:
        """Uninstall the guard and the locator. The Runner also calls this after an error."""
        self._undo.close()
        self.guard = self.locator = None
