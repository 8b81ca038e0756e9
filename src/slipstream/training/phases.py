"""SuperGradients' callback phases, and the context passed to callbacks."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any

from slipstream.errors import ConfigError, SlipstreamError, did_you_mean
from slipstream.hooks import CheckpointHook, EMAHook
from slipstream.model import unwrap_model
from slipstream.training.sg_logger import SGLogger

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["EVENT_OF", "Callback", "ContextError", "Phase", "PhaseCallback", "PhaseContext"]


class Phase(Enum):
    """The point at which a `PhaseCallback` is called."""

    PRE_TRAINING = "PRE_TRAINING"
    TRAIN_EPOCH_START = "TRAIN_EPOCH_START"
    TRAIN_BATCH_END = "TRAIN_BATCH_END"
    TRAIN_BATCH_STEP = "TRAIN_BATCH_STEP"
    TRAIN_EPOCH_END = "TRAIN_EPOCH_END"
    VALIDATION_BATCH_END = "VALIDATION_BATCH_END"
    VALIDATION_EPOCH_END = "VALIDATION_EPOCH_END"
    VALIDATION_END_BEST_EPOCH = "VALIDATION_END_BEST_EPOCH"
    TEST_BATCH_END = "TEST_BATCH_END"
    TEST_END = "TEST_END"
    POST_TRAINING = "POST_TRAINING"


EVENT_OF = {
    Phase.PRE_TRAINING: "on_training_start",
    Phase.TRAIN_EPOCH_START: "on_train_loader_start",
    Phase.TRAIN_BATCH_END: "on_train_batch_loss_end",
    Phase.TRAIN_BATCH_STEP: "on_train_batch_gradient_step_end",
    Phase.TRAIN_EPOCH_END: "on_train_loader_end",
    Phase.VALIDATION_BATCH_END: "on_validation_batch_end",
    Phase.VALIDATION_EPOCH_END: "on_validation_loader_end",
    Phase.VALIDATION_END_BEST_EPOCH: "on_validation_end_best_epoch",
    Phase.TEST_BATCH_END: "on_test_batch_end",
    Phase.TEST_END: "on_test_loader_end",
    Phase.POST_TRAINING: "on_training_end",
}


class ContextError(SlipstreamError, AttributeError):
    """An attribute of `PhaseContext` is not available at the current event, or does not exist."""


class PhaseContext:
    """Gives callbacks access to the run. Attributes are evaluated on access.

    Always available: `runner`, `epoch` (counted from 0), `net`, `device`, `experiment_name`, `ckpt_dir`,
    `stop_training`, `ddp_silent_mode`, `architecture`, `ema_model`, `sg_logger`. During training: `optimizer`,
    `criterion`, `train_loader`, `valid_loader`, `metric_to_watch`. At batch events: `batch_idx`, and `inputs`, `target`
    and `additional_batch_items` as returned by the data loader. `additional_batch_items` is the third item of a batch
    (inputs, targets, dict); its entries are also available under their own names. After a training step:
    `loss_log_items`, a dict of 0-dim tensors on the device. After an evaluation batch: `preds`. At the end of an epoch:
    `metrics_dict`.

    Set `stop_training` to True to stop training after the current epoch and its validation. Additional attributes that
    callbacks set are available at all later events.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.stop_training = False
        self._event = ""
        self._values: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._values:
            return self._values[name]
        reason = _OTHER_EVENTS.get(name) or _UNSUPPORTED.get(name, "")
        if name in _ATTRIBUTES:
            try:
                return _ATTRIBUTES[name](self.runner)
            except (AttributeError, StopIteration):
                raise ContextError(f"context.{name} is not available in this run") from None
        elif name == "metrics_dict" and self._event == "on_train_loader_end":
            return _train_metrics(self.runner)
        hint = reason or did_you_mean(name, [*_ATTRIBUTES, *self._values, *_OTHER_EVENTS]).removeprefix("; ")
        phase = next((f" ({phase})" for phase, event in EVENT_OF.items() if event == self._event), "")
        raise ContextError(f"context.{name} is not available at {self._event}{phase}{hint and ': ' + hint}")

    def enter(self, event: str, values: dict[str, Any]) -> None:
        """Set the current event and the values that are available only at this event."""
        self._event, self._values = event, values

    @property
    def epoch(self) -> int:
        """Current epoch, counted from 0. During validation, the most recent training epoch."""
        training = self._event.startswith(("on_train_", "on_training_start"))
        return self.runner.epoch if training else max(self.runner.epoch - 1, 0)

    def update_context(self, **values: Any) -> None:
        """Set several attributes."""
        for name, value in values.items():
            setattr(self, name, value)


_ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "net": lambda runner: getattr(unwrap_model(runner.model), "network", unwrap_model(runner.model)),
    "device": lambda runner: runner.device,
    "experiment_name": lambda runner: runner.experiment_name,
    "ckpt_dir": lambda runner: runner.work_dir,
    "ddp_silent_mode": lambda runner: runner.rank > 0,
    "architecture": lambda runner: type(_ATTRIBUTES["net"](runner)).__name__,
    "ema_model": lambda runner: next((h.ema_model for h in runner.hooks if isinstance(h, EMAHook)), None),
    "optimizer": lambda runner: runner.optim_wrapper.optimizer,
    "criterion": lambda runner: unwrap_model(runner.model).loss,
    "train_loader": lambda runner: runner.train_dataloader,
    "valid_loader": lambda runner: runner.val_dataloader,
    "valid_loaders_dict": lambda runner: {"": runner.val_dataloader},
    "test_loader": lambda runner: runner.test_dataloader,
    "sg_logger": SGLogger,
    "metric_to_watch": lambda runner: next(
        name
        for hook in runner.hooks
        if isinstance(hook, CheckpointHook)
        for name in hook.monitors
        if name != "auto"
    ),
}

_OTHER_EVENTS = {
    "preds": "a training step returns only losses; predictions are available after evaluation batches",
    "metrics_dict": "metrics are available when an epoch or a validation run ends",
    "loss_log_items": "losses are available after a training step",
    "batch_idx": "available only at batch events",
    "additional_batch_items": "available only at batch events",
    "inputs": "available only at batch events",
    "target": "available only at batch events",
}
"""Attributes that are available only at other events."""

_PARAMS = "use an attribute of context.runner instead, such as max_epochs, cfg or optim_wrapper"
_UNSUPPORTED = {
    "loss_avg_meter": "losses are averaged at log intervals; metrics_dict contains their means when an epoch ends",
    "metrics_compute_fn": "use context.runner.val_loop.evaluator instead",
    "valid_metrics": "use context.runner.val_loop.evaluator instead",
    "training_params": _PARAMS,
    "lr_warmup_epochs": _PARAMS,
    "arch_params": "the network is already built; use context.net instead",
    "checkpoint_params": "the network is already built; use context.net instead",
}


def _train_metrics(runner: Runner) -> dict[str, Any]:
    """Return the epoch's mean losses and training metrics as a dict."""
    runner.read_logs()
    hub, length, prefix = runner.message_hub, runner.train_loop.epoch_length, "train/"
    no_metrics = ("time", "lr", "momentum")
    kept = {k: h for k, h in hub.log_scalars.items() if not k.endswith(no_metrics) and "/lr/" not in k}
    means = {key: history.mean(length) for key, history in kept.items()}
    named = {**means, **hub.runtime_info}
    return {key.removeprefix(prefix): value for key, value in named.items() if key.startswith(prefix)}


class Callback:
    """Base class for callbacks. Override the methods for the events that you need; other events add no overhead.

    A training step runs as a single call or CUDA graph. Events within the step are triggered after the step.
    The `on_train_batch_backward_end` and `on_train_batch_gradient_step_start` events are not supported.
    """

    def on_training_start(self, context: PhaseContext) -> None:
        """Called before the first epoch."""

    def on_train_loader_start(self, context: PhaseContext) -> None:
        """Called before each training epoch."""

    def on_train_batch_start(self, context: PhaseContext) -> None:
        """Called before each training step."""

    def on_train_batch_loss_end(self, context: PhaseContext) -> None:
        """Called after each training step, with its losses."""

    def on_train_batch_gradient_step_end(self, context: PhaseContext) -> None:
        """Called after each training step that updates the weights (the last step of an accumulation window)."""

    def on_train_batch_end(self, context: PhaseContext) -> None:
        """Called after each training step."""

    def on_train_loader_end(self, context: PhaseContext) -> None:
        """Called after each training epoch."""

    def on_validation_loader_start(self, context: PhaseContext) -> None:
        """Called before validation."""

    def on_validation_batch_start(self, context: PhaseContext) -> None:
        """Called before each validation batch."""

    def on_validation_batch_end(self, context: PhaseContext) -> None:
        """Called after each validation batch, with its predictions."""

    def on_validation_loader_end(self, context: PhaseContext) -> None:
        """Called after validation, with its metrics."""

    def on_validation_end_best_epoch(self, context: PhaseContext) -> None:
        """Called after validation reaches a new best value of the watched metric, once the checkpoint is saved."""

    def on_average_best_models_validation_start(self, context: PhaseContext) -> None:
        """Called before validating the average of the best models."""

    def on_average_best_models_validation_end(self, context: PhaseContext) -> None:
        """Called after validating the average of the best models."""

    def on_test_loader_start(self, context: PhaseContext) -> None:
        """Called before testing."""

    def on_test_batch_start(self, context: PhaseContext) -> None:
        """Called before each test batch."""

    def on_test_batch_end(self, context: PhaseContext) -> None:
        """Called after each test batch, with its predictions."""

    def on_test_loader_end(self, context: PhaseContext) -> None:
        """Called after testing, with its metrics."""

    def on_training_end(self, context: PhaseContext) -> None:
        """Called after the last epoch."""


class PhaseCallback(Callback):
    """A callback for one phase. Subclasses define `__call__(context)`.

    Args:
        phase: a `Phase`, or its name.
    """

    def __init__(self, phase: Phase | str) -> None:
        names = [known.value for known in Phase]
        if not isinstance(phase, Phase) and phase not in names:
            raise ConfigError(f"no phase is named {phase!r}{did_you_mean(str(phase), names)}", "phase")
        self.phase = Phase(phase)

    def __call__(self, context: PhaseContext) -> None:
        """Called at this callback's phase."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(context)")
