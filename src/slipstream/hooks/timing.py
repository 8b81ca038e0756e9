"""How long steps take, and what that means for the rest of the run."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from slipstream.hooks.hook import Hook
from slipstream.registry import HOOKS

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["DistSamplerSeedHook", "IterTimerHook"]


@HOOKS.register_module()
class IterTimerHook(Hook):
    """Record `time` and `data_time` (seconds) of every batch, and `eta` (seconds).

    On an accelerator a single step's time is that of its launch; means over a log interval are true.
    """

    def __init__(self) -> None:
        self._last = 0.0
        self._spent = 0.0
        self._steps = 0

    def before_train(self, runner: Runner) -> None:
        """Start counting."""
        self._spent, self._steps = 0.0, 0

    def _before_epoch(self, runner: Runner, mode: str = "train") -> None:
        self._last = perf_counter()

    def _before_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, mode: str = "train"
    ) -> None:
        runner.message_hub.update_scalar(f"{mode}/data_time", perf_counter() - self._last)

    def _after_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None, mode: str = "train"
    ) -> None:
        now = perf_counter()
        spent, self._last = now - self._last, now
        hub = runner.message_hub
        hub.update_scalar(f"{mode}/time", spent)
        if mode == "train":
            self._spent += spent
            self._steps += 1
            mean, left = self._spent / self._steps, runner.max_iters - runner.iter - 1
        else:
            loader = runner.val_dataloader if mode == "val" else runner.test_dataloader
            mean, left = hub.get_scalar(f"{mode}/time").mean(), len(loader) - batch_idx - 1
        hub.update_info("eta", mean * left, resumed=False)

    def after_val(self, runner: Runner) -> None:
        """Leave the validation out of the next step's time."""
        self._last = perf_counter()

    def after_train(self, runner: Runner) -> None:
        """Say how fast the training was."""
        if self._steps:
            images = self._steps * runner.samples_per_step
            runner.logger.info(
                f"Trained {self._steps} steps in {self._spent:.1f} s: {images / self._spent:.1f} images/s"
            )
            runner.message_hub.update_info("images_per_second", images / self._spent, resumed=False)


@HOOKS.register_module()
class DistSamplerSeedHook(Hook):
    """Nothing is left for it to do: the loops themselves give every sampler its epoch.

    The name stays, with its place among the default hooks, for the configurations that mention it.
    """
