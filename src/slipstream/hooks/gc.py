"""Collect garbage when the step counter says so, not when a counter of objects does."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from slipstream.errors import ConfigError
from slipstream.hooks.hook import Hook
from slipstream.registry import HOOKS

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["GcHook"]


@HOOKS.register_module()
class GcHook(Hook):
    """Collect every `interval` steps, the same ones on every rank, and never in between.

    Python collects when enough objects have been made, on each rank at another step, and all others wait for it in
    the next gradient sync. After `warmup` steps the objects that exist (modules, optimizer, compiled code) are set
    aside, so that no collection walks through them again. When the training ends, or `close` is called,
    everything is as it was.

    Args:
        interval: steps between two collections; batches, in a validation.
        warmup: steps after which this begins.
    """

    priority = "LOWEST"

    def __init__(self, interval: int = 1000, warmup: int = 10) -> None:
        for name, value, least in (("interval", interval, 1), ("warmup", warmup, 0)):
            if value < least:
                raise ConfigError(f"must be at least {least}, not {value}", name)
        self.interval = interval
        self.warmup = warmup
        self._steps = 0
        self._was_enabled: bool | None = None  # None while Python collects by itself

    def before_train(self, runner: Runner) -> None:
        """Start counting."""
        self._steps = 0

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Take over after the warm-up; collect when it is time."""
        self._steps += 1
        if self._was_enabled is None and self._steps > self.warmup:
            self._was_enabled = gc.isenabled()
            gc.collect()
            gc.freeze()
            gc.disable()
        elif self._was_enabled is not None and self.every_n_train_iters(runner, self.interval):
            gc.collect()

    def _after_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None, mode: str = "train"
    ) -> None:
        if self._was_enabled is not None and self.every_n_inner_iters(batch_idx, self.interval):
            gc.collect()

    def after_train(self, runner: Runner) -> None:
        """Put everything back."""
        self.close()

    def close(self) -> None:
        """Leave the garbage collector as it was found, whether the training ended well or not."""
        if self._was_enabled is None:
            return
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()
        self._was_enabled = None
