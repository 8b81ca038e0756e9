"""Validate and save the model with averaged weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slipstream.checkpoint import restoring
from slipstream.checkpoint.weights import compare_weights
from slipstream.hooks.hook import Hook
from slipstream.model import AveragePart, BaseAveragedModel, check_begin, unwrap_model
from slipstream.registry import HOOKS, MODELS
from slipstream.step import CompiledStep, EagerStep

if TYPE_CHECKING:
    from slipstream.runner import Runner


@HOOKS.register_module()
class EMAHook(Hook):
    """Maintain an average of the weights for use in validation, testing and the saved `state_dict`.

    Checkpoints store the average as `state_dict` and the training weights as `ema_state_dict`; a resumed run restores
    both.

    The training step updates the average (`slipstream.model.AveragePart`). If the model overrides `train_step`,
    the hook updates the average after each iteration.

    Args:
        ema_type: name of a subclass of `BaseAveragedModel`, or a callable that creates the average of a model, such as
            `EmaOptions(...).average`.
        strict_load: whether a loaded checkpoint must contain every tensor of the average.
        begin_iter, begin_epoch: start of averaging; set at most one of them.
        kwargs: arguments for the average (`momentum`, `interval`, `update_buffers`; `decay` for `ScheduledEMA`).
    """

    priority = "NORMAL"
    # The config path of the speed option that the hook implements; the class name if the user has added the hook.
    option = "EMAHook"

    def __init__(
        self,
        ema_type: str | Callable[..., BaseAveragedModel] = "ExponentialMovingAverage",
        strict_load: bool = False,
        begin_iter: int = 0,
        begin_epoch: int = 0,
        **kwargs: Any,
    ) -> None:
        check_begin(begin_iter, begin_epoch)
        self.strict_load = strict_load
        self.begin_iter, self.begin_epoch = begin_iter, begin_epoch
        self._cfg = {"type": ema_type, **kwargs}
        MODELS.build(self._cfg, default_args={"model": nn.Identity()})  # checks the arguments
        self.model: Any = None
        self.ema_model: Any = None  # a BaseAveragedModel; `before_run` creates it
        self._resumed: tuple[dict[str, Any], Any] | None = None
        self._part: AveragePart | None = None  # if the step does not update the average

    def before_run(self, runner: Runner) -> None:
        """Create the average, or keep the existing average if it belongs to this model.

        Raises:
            ConfigError: the run has more than one `EMAHook`; a checkpoint can contain only one average.
        """
        first = next(hook for hook in runner.hooks if isinstance(hook, EMAHook))
        if first is not self:
            message = "a checkpoint contains one average; remove one of the EMAHooks"
            raise self.config_error(f"{message} {first._cfg} and {self._cfg}", "type")
        if self.model is not unwrap_model(runner.model):
            self.model = unwrap_model(runner.model)
            self.ema_model = MODELS.build(self._cfg, default_args={"model": self.model})

    def before_train(self, runner: Runner) -> None:
        """Initialize the average from the model unless training is resumed, and add its update to the step."""
        average, optim = self.ema_model, runner.optim_wrapper
        assert optim is not None, "training requires an optimizer wrapper"
        average.swap_in(self.model, average=False)
        if self.begin_epoch and not (runner.by_epoch and runner.knows_length):
            message = "requires training by epochs over a loader that has a length; use begin_iter"
            raise self.config_error(message, f"{self.option}.begin_epoch".removeprefix("EMAHook."))
        if average.steps == 0 or self._resumed is not None:
            average.restart(self.model)  # also initializes tensors that a resumed checkpoint does not contain
        if self._resumed is not None:
            state, steps = self._resumed
            with restoring("ema_state_dict", "the resumed checkpoint"):
                average.module.load_state_dict(state, strict=self.strict_load)
                average.steps = int(steps)
            self._resumed = None
        skipped = max(self.begin_iter - 1, 0)
        if self.begin_epoch:
            skipped = (self.begin_epoch - 1) * runner.train_loop.epoch_length
        total = runner.max_iters if runner.knows_length else None
        if warning := average.start(total, skipped, optim.accumulation):
            remedy = " (decay = 1 - momentum)" if self.option == "EMAHook" else ""
            runner.logger.warning(f"{self.option}: {warning}{remedy}")
        # Remove the part that an earlier training run with the same optimizer added.
        optim.parts[:] = [part for part in optim.parts if not isinstance(part, AveragePart)]
        self._part = AveragePart(average, self.model, lambda: runner.iter, optim, skipped)
        if isinstance(runner.step, EagerStep | CompiledStep):
            optim.parts.append(self._part)
            self._part = None

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Update the average, unless the training step updates it."""
        if self._part is not None:
            self._part.update()

    def before_val_epoch(self, runner: Runner) -> None:
        """Swap in the averaged weights."""
        self.ema_model.swap_in(self.model, average=True)

    def after_val(self, runner: Runner) -> None:
        """Swap the training weights back, after all hooks have received the metrics of the averaged weights."""
        self.ema_model.swap_in(self.model, average=False)

    before_test_epoch, after_test = before_val_epoch, after_val

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        """Save the average as `state_dict`, from its first update on, and the training weights as `ema_state_dict`."""
        weights = {f"module.{key}": value for key, value in checkpoint["state_dict"].items()}
        if self.ema_model.steps:
            if runner.is_training:
                self.ema_model.sync_buffers()
            self.ema_model.copy_buffers(self.model)
            checkpoint["state_dict"] = dict(self.ema_model.module.state_dict())
        checkpoint["ema_state_dict"] = {**weights, "steps": torch.tensor(self.ema_model.steps)}

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        """If the run is resumed, restore the average and the training weights; otherwise, the model loads the average.

        `before_train` loads the average, after all entries of the checkpoint have been checked. If the run is not
        resumed, an existing average is discarded: it starts again from the loaded weights.
        """
        self._resumed = None
        if self.ema_model is not None:
            self.ema_model.swap_in(self.model, average=False)
        if not runner.checkpoints.resuming:
            if self.ema_model is not None:
                self.ema_model.steps = 0
            return
        warn = runner.logger.warning
        if "ema_state_dict" not in checkpoint:
            warn(
                f"{self.option}: the checkpoint contains no 'ema_state_dict', so the average starts from 'state_dict'"
            )
            return
        average, weights = checkpoint["state_dict"], dict(checkpoint.pop("ema_state_dict"))
        self._resumed = average, weights.pop("steps")
        checkpoint["state_dict"] = {key.removeprefix("module."): value for key, value in weights.items()}
        source = "the average in the checkpoint"
        for line in compare_weights(self.ema_model.module, average, self.strict_load, source)[0]:
            warn(f"{self.option}: {source}: {line}; missing averages start again from the model's weights")


@contextmanager
def validation_weights(runner: Runner, average: bool = True) -> Iterator[nn.Module]:
    """Context manager that yields the unwrapped model with its validation weights.

    These are the averaged weights if the run has an `EMAHook` and `average` is True; otherwise, the training weights.
    An optimizer with modes (schedule-free) is in evaluation mode.
    """
    hook = next((hook for hook in runner.hooks if isinstance(hook, EMAHook)), None)
    model, optim = unwrap_model(runner.model), runner.optim_wrapper
    with ExitStack() as stack:
        if optim is not None:
            stack.enter_context(optim.evaluating())
        if hook is not None and hook.ema_model is not None:
            stack.enter_context(hook.ema_model.swapped_in(model, average))
        yield model
