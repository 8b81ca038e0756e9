"""Validate and save the model with averaged weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from slipstream.checkpoint import check_tensors, restoring
from slipstream.errors import CheckpointError, ConfigError
from slipstream.hooks.hook import Hook
from slipstream.model import AveragePart, BaseAveragedModel, check_begin, unwrap_model
from slipstream.registry import HOOKS, MODELS
from slipstream.sharding import mesh_of
from slipstream.step import CompiledStep, EagerStep

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["EMAHook", "training_weights", "validation_weights"]


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
            raise ConfigError(
                "cannot be combined with 'momentum' (momentum = 1 - decay); remove one of them", "decay"
            )
        self.strict_load = strict_load
        self.begin_iter, self.begin_epoch = begin_iter, begin_epoch
        self._cfg = {"type": ema_type, **kwargs}
        self._new_average(nn.Identity())  # checks the arguments
        self.ema_model: BaseAveragedModel | None = None
        self.model: nn.Module
        self._resumed: dict[str, Any] | None = None
        self._part: AveragePart | None = None
        self._in_step = False

    def _new_average(self, model: nn.Module) -> BaseAveragedModel:
        average: BaseAveragedModel = MODELS.build(self._cfg, default_args={"model": model})
        return average

    def before_run(self, runner: Runner) -> None:
        """Create the average, or keep the existing average if it belongs to this model.

        Raises:
            ConfigError: the run has more than one `EMAHook`; a checkpoint can contain only one average.
        """
        first = next(hook for hook in runner.hooks if isinstance(hook, EMAHook))
        if first is not self:
            raise self.config_error(
                f"the run has two EMAHooks with the averages {first._cfg} and {self._cfg}, but a checkpoint contains "
                "only one average; remove one of the hooks",
                "type",
            )
        if self.ema_model is None or self.model is not unwrap_model(runner.model):
            self.model = unwrap_model(runner.model)
            self.ema_model = self._new_average(self.model)

    def before_train(self, runner: Runner) -> None:
        """Initialize the average from the model unless training is resumed, and add its update to the step."""
        average, optim = self._average, runner.optim_wrapper
        assert optim is not None, "training requires an optimizer wrapper"
        average.swap_in(self.model, average=False)
        if self.begin_epoch and not runner.by_epoch:
            raise self.config_error(
                "counts epochs, but training is iteration-based; use begin_iter", "begin_epoch"
            )
        if not runner.knows_length and (self.begin_epoch or getattr(average, "decay_type", None) == "exp"):
            raise self.config_error(
                "begin_epoch and the decay_type 'exp' depend on the number of training steps, but the training loader "
                "has no length; use begin_iter and 'threshold', or train by iterations (train_cfg.by_epoch=False)",
                "begin_epoch" if self.begin_epoch else "decay_type",
            )
        self._restore()
        skipped = max(self.begin_iter - 1, 0)
        if self.begin_epoch:
            skipped = (self.begin_epoch - 1) * runner.train_loop.epoch_length
        total = runner.max_iters if runner.knows_length else None
        window = optim.accumulative_counts
        if warning := average.start(total, skipped, window):
            runner.logger.warning(f"EMAHook: {warning}")
        # Remove the part that an earlier training run with the same optimizer added.
        optim.parts[:] = [part for part in optim.parts if part is not self._part]
        # The NaN guard restores the buffers after a non-finite step, so they can only be averaged after the guard runs.
        # Sharded weights may get new storage when they are first gathered. In both cases, a compiled step's graph must
        # not contain the update of the average, which then runs after the graph (`on_host`).
        on_host = getattr(optim, "guard", None) is not None or mesh_of(self.model) is not None
        self._part = AveragePart(
            average,
            self.model,
            batch_count=lambda: runner.iter,
            ends_window=lambda batch: batch % window == 0 or batch == runner.max_iters,
            skipped=skipped,
            on_host=on_host,
        )
        self._in_step = isinstance(runner.step, EagerStep | CompiledStep)
        if self._in_step:
            optim.parts.append(self._part)

    def _restore(self) -> None:
        """Load the average from the resumed checkpoint; if there is none, start from the model's weights."""
        average = self._average
        if self._resumed is not None:
            with restoring("ema_state_dict", "the resumed checkpoint"):
                average.restart(self.model)  # initializes the tensors that were not saved
                average.load_state_dict(self._resumed, strict=self.strict_load)
            self._resumed = None
        if average.steps == 0:
            average.restart(self.model)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Update the average, unless the training step updates it."""
        if self._part is not None and not self._in_step:
            self._part.before_batch()
            self._part.after_batch()
            self._part.count_batch()

    def before_val_epoch(self, runner: Runner) -> None:
        """Swap in the averaged weights."""
        self._average.swap_in(self.model, average=True)

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Swap the training weights back."""
        self._average.swap_in(self.model, average=False)

    before_test_epoch, after_test_epoch = before_val_epoch, after_val_epoch

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        """After the first update, save the average as `state_dict` and the training weights as `ema_state_dict`."""
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
        """If the run is resumed, restore the average and the training weights; otherwise, the model loads the average.

        `before_train` loads the average, after all entries of the checkpoint have been checked.
        """
        self._resumed = None
        if not runner.checkpoints.resuming:
            return
        self._average.swap_in(self.model, average=False)
        if "ema_state_dict" not in checkpoint:
            window = runner.optim_wrapper.accumulative_counts if runner.optim_wrapper is not None else 1
            begin = self.begin_iter + self._average.interval * window
            if checkpoint["meta"]["iter"] >= begin and checkpoint["meta"]["epoch"] >= self.begin_epoch:
                runner.logger.warning(
                    "EMAHook: the checkpoint has no 'ema_state_dict'. The average starts again from the weights in "
                    "'state_dict'"
                )
            return
        saved = checkpoint.pop("ema_state_dict")
        prefix = "module."
        weights = {k.removeprefix(prefix): v for k, v in saved.items() if k.startswith(prefix)}
        average = {prefix + key: value for key, value in checkpoint["state_dict"].items()}
        self._resumed = {**average, "steps": saved["steps"]}
        self._check_resumed(runner, average)
        checkpoint["state_dict"] = weights

    def _check_resumed(self, runner: Runner, average: dict[str, Any]) -> None:
        """Check that a saved average matches this model."""
        expected = {key: value for key, value in self._average.state_dict().items() if key != "steps"}
        check_tensors(expected, average, "state_dict", "the average in the checkpoint", runner.logger.warning)
        if names := sorted(expected.keys() ^ average.keys()):
            text = f"the averaged weights in the checkpoint do not match the model ({', '.join(names[:5])})"
            if self.strict_load or not expected.keys() & average.keys():
                raise CheckpointError(f"'state_dict': {text}")
            runner.logger.warning(f"EMAHook: {text}; missing averages start again from the model's weights")

    @property
    def _average(self) -> BaseAveragedModel:
        assert self.ema_model is not None, "before_run creates it"
        return self.ema_model


@contextmanager
def validation_weights(runner: Runner, average: bool = True) -> Iterator[nn.Module]:
    """Context manager that yields the unwrapped model with its validation weights.

    These are the averaged weights if the run has an `EMAHook`, and the training weights otherwise.
    """
    hook = next((hook for hook in runner.hooks if isinstance(hook, EMAHook)), None)
    if hook is None:
        yield unwrap_model(runner.model)
    else:
        with hook._average.swapped_in(hook.model, average):
            yield unwrap_model(runner.model)


def training_weights(runner: Runner) -> AbstractContextManager[nn.Module]:
    """Return a context manager that yields the unwrapped model with its training weights, even during validation."""
    return validation_weights(runner, average=False)
