"""Validate and save with an average of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from slipstream.errors import ConfigError
from slipstream.hooks.hook import Hook
from slipstream.model import BaseAveragedModel, unwrap_model
from slipstream.registry import HOOKS, MODELS

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["EMAHook"]


@HOOKS.register_module()
class EMAHook(Hook):
    """Keep an average of the weights; it replaces them in validation, test and the saved `state_dict`.

    The weights themselves are saved as `ema_state_dict`, so that a resumed run goes on with both.

    Args:
        ema_type: a subclass of `BaseAveragedModel`, by name.
        strict_load: whether a loaded checkpoint must hold every tensor of the average.
        begin_iter, begin_epoch: when averaging starts; at most one of them.
        kwargs: those of the average (`momentum`, `interval`, `update_buffers`).
    """

    priority = "NORMAL"

    def __init__(
        self,
        ema_type: str = "ExponentialMovingAverage",
        strict_load: bool = False,
        begin_iter: int = 0,
        begin_epoch: int = 0,
        **kwargs: Any,
    ) -> None:
        if begin_iter and begin_epoch:
            raise ConfigError("give begin_iter or begin_epoch, not both", "begin_epoch")
        for name, value in {"begin_iter": begin_iter, "begin_epoch": begin_epoch}.items():
            if value < 0:
                raise ConfigError(f"must not be negative, not {value}", name)
        self.strict_load = strict_load
        self.begin_iter, self.begin_epoch = begin_iter, begin_epoch
        self._cfg = {"type": ema_type, **kwargs}
        MODELS.build(self._cfg, default_args={"model": nn.Identity()})  # wrong arguments are found here
        self.ema_model: BaseAveragedModel | None = None
        self.model: nn.Module
        self._swapped = False

    def before_run(self, runner: Runner) -> None:
        """Copy the model; a test after a training goes on with the training's average."""
        if self.ema_model is None or self.model is not unwrap_model(runner.model):
            self.model = unwrap_model(runner.model)
            self.ema_model = MODELS.build(self._cfg, default_args={"model": self.model})

    def before_train(self, runner: Runner) -> None:
        """Start from the weights that were initialised or loaded, unless a resumed average is further."""
        self._show(average=False)
        if self.begin_epoch and not runner.by_epoch:
            raise self.wrong(
                "counts epochs, but the training counts iterations: give begin_iter", "begin_epoch"
            )
        if self._average.steps == 0:
            self._average.module.load_state_dict(self.model.state_dict())

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Take the new weights into the average."""
        if runner.iter + 1 >= self.begin_iter and runner.epoch + 1 >= self.begin_epoch:
            self._average.update_parameters(self.model)

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
