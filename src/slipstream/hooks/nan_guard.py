"""Stop training at a non-finite loss or skip the step, and report the faulty module."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal

from slipstream.hooks.hook import Hook
from slipstream.model import unwrap_model
from slipstream.optim import OptimWrapperDict
from slipstream.registry import HOOKS
from slipstream.speed.nan_guard import NanGuardOptions, SkipNonFinite

if TYPE_CHECKING:
    from slipstream.runner import Runner


@HOOKS.register_module()
class NanGuardHook(Hook):
    """Stop training if a loss is not finite, or skip each step whose loss or gradient is not finite.

    Args:
        action, max_skipped: see `NanGuardOptions`.
    """

    def __init__(self, action: Literal["stop", "skip"] = "stop", max_skipped: int = 50) -> None:
        self.options = NanGuardOptions(action, max_skipped)
        self.guard: SkipNonFinite | None = None
        self._cleanup = ExitStack()
        # Number of skipped steps, as of the last call to `read_logs`.
        self.skipped = 0

    def before_run(self, runner: Runner) -> None:
        """Add the guard to the step, unless the run's speed options have added it."""
        self.release(runner)
        optim, meter = runner.optim_wrapper, runner.meter
        if optim is None or self.options.action == "stop":
            return
        if isinstance(optim, OptimWrapperDict):
            raise self.config_error(
                "'skip' of nan_guard supports only one optimizer, but this run has several; use 'stop'",
                "action",
            )
        self.guard = next((part for part in optim.parts if isinstance(part, SkipNonFinite)), None)
        if self.guard is None:
            self.guard = SkipNonFinite(unwrap_model(runner.model), runner.device, self.options.max_skipped)
            optim.parts.append(self.guard)
            self._cleanup.callback(optim.parts.remove, self.guard)
        self.guard.reads_itself = False
        meter.tolerant = True
        self._cleanup.callback(setattr, meter, "tolerant", False)

    def read_logs(self, runner: Runner) -> None:
        """Log the number of steps skipped since the last call."""
        if self.guard is None:
            return
        skipped = self.guard.read()
        self.skipped += skipped
        runner.message_hub.update_scalar("train/skipped_steps", self.skipped)
        if skipped:
            runner.logger.warning(
                f"Skipped {skipped} step{'s' if skipped > 1 else ''} with a non-finite loss or gradient, up to "
                f"iteration {runner.iter + 1}"
            )

    def release(self, runner: Runner) -> None:
        """Remove the guard."""
        self._cleanup.close()
        self.guard = None
