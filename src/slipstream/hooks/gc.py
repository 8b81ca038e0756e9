"""Run Python's garbage collector at fixed intervals."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from slipstream.hooks.hook import Hook
from slipstream.registry import HOOKS
from slipstream.typecheck import NonNegativeInt, PositiveInt, check

if TYPE_CHECKING:
    from slipstream.runner import Runner


@HOOKS.register_module()
class GcHook(Hook):
    """Run garbage collection every `interval` steps, at the same steps on every rank.

    By default, Python runs a collection when enough objects have been allocated. Ranks reach this threshold at
    different steps, and each collection makes the other ranks wait in the next gradient reduction. After `warmup`
    steps, this hook disables automatic collection and freezes the existing objects (modules, optimizer, compiled code),
    which later collections skip. At the end of training, or when `release` is called, the hook restores the previous
    state.

    Args:
        interval: number of steps (batches during validation) between garbage collections.
        warmup: number of steps before the hook disables automatic collection.
    """

    priority = "LOWEST"

    def __init__(self, interval: PositiveInt = 1000, warmup: NonNegativeInt = 10) -> None:
        check(interval, PositiveInt, "interval")
        check(warmup, NonNegativeInt, "warmup")
        self.interval = interval
        self.warmup = warmup
        self._steps = 0
        self._was_enabled: bool | None = None  # None unless this hook has disabled automatic collection

    def before_train(self, runner: Runner) -> None:
        """Reset the step counter."""
        self._steps = 0

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Disable automatic collection after the warm-up; then collect every `interval` steps."""
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
        """Restore the garbage collector."""
        self.release(runner)

    def release(self, runner: Runner) -> None:
        """Restore the state of the garbage collector."""
        if self._was_enabled is None:
            return
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()
        self._was_enabled = None
