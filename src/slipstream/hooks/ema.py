"""Validate and save with an average of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from slipstream.dist.sharding import mesh_of
from slipstream.errors import ConfigError
from slipstream.hooks.hook import Hook
from slipstream.model import BaseAveragedModel, unwrap_model
from slipstream.registry import HOOKS, MODELS
from slipstream.speed.ema import check_begin
from slipstream.step import EagerStep
from slipstream.step.average import AveragePart
from slipstream.step.graph import GraphStep

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["EMAHook", "as_validated"]


@HOOKS.register_module()
class EMAHook(Hook):
    """Keep an average of the weights; it replaces them in validation, test and the saved `state_dict`.

    The weights themselves are saved as `ema_state_dict`, so that a resumed run goes on with both.

    The average is a part of the training step (`slipstream.step.average.AveragePart`). If the model trains itself by a
    `train_step` of its own, the hook updates the average after each iteration.

    Args:
        ema_type: a subclass of `BaseAveragedModel`, by name; or what makes the average of a model, such as
            `EmaOptions(...).average`.
        strict_load: whether a loaded checkpoint must hold every tensor of the average.
        begin_iter, begin_epoch: when averaging starts; at most one of them.
        kwargs: those of the average (`momentum`, `interval`, `update_buffers`; of `ScheduledEMA`, `decay`).
    """

    priority = "NORMAL"

    def __init__(
        self,
        ema_type: str | Callable[..., BaseAveragedModel] = "ExponentialMovingAverage",
        strict_load: bool = False,
        begin_iter: int = 0,
        begin_epoch: int = 0,
        **kwargs: Any,
    ) -> None:
        check_begin(begin_iter, begin_epoch)
        if "momentum" in kwargs and "decay" in kwargs:
            raise ConfigError("give momentum, which is 1 - decay, or decay, not both", "decay")
        self.strict_load = strict_load
        self.begin_iter, self.begin_epoch = begin_iter, begin_epoch
        self._cfg = {"type": ema_type, **kwargs}
        self._new_average(nn.Identity())  # wrong arguments are found here
        self.ema_model: BaseAveragedModel | None = None
        self.model: nn.Module
        self._swapped = False
        self._part: AveragePart | None = None
        self._in_step = False

    def _new_average(self, model: nn.Module) -> BaseAveragedModel:
        average: BaseAveragedModel = MODELS.build(self._cfg, default_args={"model": model})
        return average

    def before_run(self, runner: Runner) -> None:
        """Copy the model; a test after a training goes on with the training's average."""
        if self.ema_model is None or self.model is not unwrap_model(runner.model):
            self.model = unwrap_model(runner.model)
            self.ema_model = self._new_average(self.model)

    def before_train(self, runner: Runner) -> None:
        """Start from the weights that were initialised or loaded, unless a resumed average is further."""
        self._show(average=False)
        if self.begin_epoch and not runner.by_epoch:
            raise self.wrong(
                "counts epochs, but the training counts iterations: give begin_iter", "begin_epoch"
            )
        average = self._average
        average.total_steps = self._updates(runner)
        if average.steps == 0:
            average.module.load_state_dict(self.model.state_dict())
        if (mean := average.mean_update()) < (average.total_steps - average.interval) / 2:
            runner.logger.warning(
                f"EMAHook: {average.total_steps} updates are few for this average: at the end, what is validated and "
                f"saved is about where the weights were after update {mean:.0f}. Train longer, take a smaller decay "
                "(a larger momentum), or the decay_type 'threshold', which begins small"
            )
        optim = runner.optim_wrapper
        assert optim is not None, "a training has one"
        if self._in_step and self._part is not None:  # of an earlier training with the same optimizer
            optim.parts.remove(self._part)
        self._part = part = AveragePart(
            average,
            self.model,
            done=lambda: runner.iter,
            window=_window(runner),
            total=runner.max_iters,
            begun=lambda batch: batch >= self.begin_iter and runner.epoch + 1 >= self.begin_epoch,
        )
        # Of a step that is not finite the guard puts the buffers back after it: only then they may be averaged. And
        # sharded weights may still be given other storages, when they are first gathered.
        guarded = getattr(optim, "guard", None) is not None
        part.on_host |= guarded or mesh_of(self.model) is not None
        self._in_step = isinstance(runner.step, EagerStep | GraphStep)
        if self._in_step:
            optim.parts.append(part)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Take the new weights into the average, unless the step does."""
        if self._part is not None and not self._in_step:
            self._part.before_batch()
            self._part.after_batch()

    def _updates(self, runner: Runner) -> int:
        """Return how many updates the whole training makes."""
        before = max(self.begin_iter - 1, 0)
        if self.begin_epoch:
            before = (self.begin_epoch - 1) * runner.train_loop.epoch_length
        window = 1 if self._average.every_batch else _window(runner)
        return max(1, math.ceil(runner.max_iters / window) - before // window)

    def before_val_epoch(self, runner: Runner) -> None:
        """Validate the average."""
        self._show(average=True)

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Go on with the weights."""
        self._show(average=False)

    def before_test_epoch(self, runner: Runner) -> None:
        """Test the average."""
        self._show(average=True)

    def after_test_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Go on with the weights."""
        self._show(average=False)

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        """Save the average as the model and the weights beside it, once there is an average."""
        if not self._average.steps:
            return
        if runner.is_training:
            self._average.sync_buffers()
        self._average.copy_buffers(self.model)
        average = self._average.state_dict()
        weights = checkpoint["state_dict"]
        prefix = "module."
        checkpoint["state_dict"] = {
            key.removeprefix(prefix): value for key, value in average.items() if key.startswith(prefix)
        }
        checkpoint["ema_state_dict"] = {
            **{prefix + key: value for key, value in weights.items()},
            "steps": average["steps"],
        }

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        """In a resumed run, go on with both the average and the weights; else start from the average."""
        if "ema_state_dict" not in checkpoint or not runner.resuming:
            return
        saved = checkpoint.pop("ema_state_dict")
        prefix = "module."
        weights = {k.removeprefix(prefix): v for k, v in saved.items() if k.startswith(prefix)}
        average = {prefix + key: value for key, value in checkpoint["state_dict"].items()}
        self._average.load_state_dict({**average, "steps": saved["steps"]}, strict=self.strict_load)
        checkpoint["state_dict"] = weights

    @property
    def _average(self) -> BaseAveragedModel:
        assert self.ema_model is not None, "before_run makes it"
        return self.ema_model

    def _show(self, average: bool) -> None:
        """Put the average or the weights into the model, whichever is there: a validation may have failed."""
        if self._average.steps and average != self._swapped:
            self._average.swap(self.model)
            self._swapped = average


@contextmanager
def as_validated(runner: Runner) -> Iterator[nn.Module]:
    """Give the bare model as a validation sees it: with the average of the run's `EMAHook`, if it has one."""
    before = [(hook, hook._swapped) for hook in runner.hooks if isinstance(hook, EMAHook)]
    try:
        for hook, _ in before:
            hook._show(average=True)
        yield unwrap_model(runner.model)
    finally:
        for hook, shown in before:
            hook._show(average=shown)


def _window(runner: Runner) -> int:
    """Return how many batches make an optimizer step."""
    assert runner.optim_wrapper is not None, "a training has one"
    return runner.optim_wrapper.accumulative_counts
