"""The phases of a training at which SuperGradients' callbacks are called, and what they may ask about it."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any

from slipstream.errors import ConfigError, SlipstreamError, did_you_mean
from slipstream.hooks import CheckpointHook, EMAHook
from slipstream.model import unwrap_model

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["EVENT_OF", "Callback", "ContextError", "Phase", "PhaseCallback", "PhaseContext"]


class Phase(Enum):
    """When a `PhaseCallback` is called."""

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
    """A `PhaseContext` does not have this attribute, at this phase or at all."""


class PhaseContext:
    """What a callback may ask about the run, looked up when it is asked for.

    Always: `runner`, `epoch` (counted from 0), `net`, `device`, `experiment_name`, `ckpt_dir`, `stop_training`,
    `ddp_silent_mode`, `architecture`, `ema_model`, and of a training `optimizer`, `criterion`, `train_loader`,
    `valid_loader`, `metric_to_watch`. At batches `batch_idx`, `inputs` and
    `target` (as the loader gives them), after a training step `loss_log_items`: 0-dim tensors by name, which stay on
    the device until somebody reads them; after a batch of an evaluation `preds`. When an epoch ends, `metrics_dict`.

    Set `stop_training` to True to end the training after the epoch and its validation. Attributes of one's own may
    be set, and stay.
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
        reason = _WHY_NOT.get(name) or _NEVER.get(name, "")
        if name in _FACTS:
            try:
                return _FACTS[name](self.runner)
            except (AttributeError, StopIteration):
                reason = "the run has none"
        elif name == "metrics_dict" and self._event == "on_train_loader_end":
            return _train_metrics(self.runner)
        hint = reason or did_you_mean(name, [*_FACTS, *self._values, *_WHY_NOT]).removeprefix("; ")
        raise ContextError(f"context.{name} is not there at {self._event}{hint and ': ' + hint}")

    def enter(self, event: str, values: dict[str, Any]) -> None:
        """Go on to an event, with what is known there alone."""
        self._event, self._values = event, values

    @property
    def epoch(self) -> int:
        """The epoch that is trained, or that has just been when it is validated; the first is 0."""
        training = self._event.startswith(("on_train_", "on_training_start"))
        return self.runner.epoch if training else max(self.runner.epoch - 1, 0)

    def update_context(self, **values: Any) -> None:
        """Set several attributes."""
        for name, value in values.items():
            setattr(self, name, value)


_FACTS: dict[str, Callable[[Any], Any]] = {
    "net": lambda runner: getattr(unwrap_model(runner.model), "network", unwrap_model(runner.model)),
    "device": lambda runner: runner.device,
    "experiment_name": lambda runner: runner.experiment_name,
    "ckpt_dir": lambda runner: runner.work_dir,
    "ddp_silent_mode": lambda runner: runner.rank > 0,
    "architecture": lambda runner: type(_FACTS["net"](runner)).__name__,
    "ema_model": lambda runner: next((h.ema_model for h in runner.hooks if isinstance(h, EMAHook)), None),
    "optimizer": lambda runner: runner.optim_wrapper.optimizer,
    "criterion": lambda runner: unwrap_model(runner.model).loss,
    "train_loader": lambda runner: runner.train_dataloader,
    "valid_loader": lambda runner: runner.val_dataloader,
    "valid_loaders_dict": lambda runner: {"": runner.val_dataloader},
    "test_loader": lambda runner: runner.test_dataloader,
    "metric_to_watch": lambda runner: next(
        name for hook in runner.hooks if isinstance(hook, CheckpointHook) for name in hook.monitors
    ),
}

_WHY_NOT = {
    "preds": "a training step gives its losses only; predictions are there after batches of an evaluation",
    "metrics_dict": "metrics are computed when an epoch or a validation ends",
    "loss_log_items": "losses are there after a training step",
    "batch_idx": "there is no batch",
    "inputs": "there is no batch",
    "target": "there is no batch",
}
"""What is there at other events."""

_PARAMS = "what became of them is read off context.runner (max_epochs, cfg, optim_wrapper)"
_NEVER = {
    "loss_avg_meter": "losses are averaged at log intervals; metrics_dict has their means when an epoch ends",
    "metrics_compute_fn": "the metrics are those of context.runner.val_loop.evaluator",
    "valid_metrics": "the metrics are those of context.runner.val_loop.evaluator",
    "sg_logger": "pictures and numbers go to context.runner.visualizer",
    "training_params": _PARAMS,
    "lr_warmup_epochs": _PARAMS,
    "arch_params": "the network was made before: ask context.net",
    "checkpoint_params": "the network was made before: ask context.net",
}


def _train_metrics(runner: Runner) -> dict[str, Any]:
    """Return the epoch's mean losses, and the metrics that were counted in it, by name."""
    runner.read_logs()
    hub, length, prefix = runner.message_hub, runner.train_loop.epoch_length, "train/"
    no_metrics = ("time", "lr", "momentum")
    kept = {k: h for k, h in hub.log_scalars.items() if not k.endswith(no_metrics) and "/lr/" not in k}
    means = {key: history.mean(length) for key, history in kept.items()}
    named = {**means, **hub.runtime_info}
    return {key.removeprefix(prefix): value for key, value in named.items() if key.startswith(prefix)}


class Callback:
    """Override the events in which something shall happen; the others cost nothing.

    A training step is one call, or one graph: what SuperGradients calls between its parts is called after it,
    and `on_train_batch_backward_end` and `on_train_batch_gradient_step_start` do not exist.
    """

    def on_training_start(self, context: PhaseContext) -> None:
        """Before the first epoch."""

    def on_train_loader_start(self, context: PhaseContext) -> None:
        """Before an epoch of training."""

    def on_train_batch_start(self, context: PhaseContext) -> None:
        """Before a training step."""

    def on_train_batch_loss_end(self, context: PhaseContext) -> None:
        """After a training step, with its losses."""

    def on_train_batch_gradient_step_end(self, context: PhaseContext) -> None:
        """After a training step that moved the weights: with accumulation, after the last of its batches."""

    def on_train_batch_end(self, context: PhaseContext) -> None:
        """After a training step."""

    def on_train_loader_end(self, context: PhaseContext) -> None:
        """After an epoch of training."""

    def on_validation_loader_start(self, context: PhaseContext) -> None:
        """Before a validation."""

    def on_validation_batch_start(self, context: PhaseContext) -> None:
        """Before a batch of a validation."""

    def on_validation_batch_end(self, context: PhaseContext) -> None:
        """After a batch of a validation, with its predictions."""

    def on_validation_loader_end(self, context: PhaseContext) -> None:
        """After a validation, with its metrics."""

    def on_validation_end_best_epoch(self, context: PhaseContext) -> None:
        """After a validation that was the best so far by the watched metric, once its checkpoint is written."""

    def on_average_best_models_validation_start(self, context: PhaseContext) -> None:
        """Before the validation of the mean of the best."""

    def on_average_best_models_validation_end(self, context: PhaseContext) -> None:
        """After the validation of the mean of the best."""

    def on_test_loader_start(self, context: PhaseContext) -> None:
        """Before a test."""

    def on_test_batch_start(self, context: PhaseContext) -> None:
        """Before a batch of a test."""

    def on_test_batch_end(self, context: PhaseContext) -> None:
        """After a batch of a test, with its predictions."""

    def on_test_loader_end(self, context: PhaseContext) -> None:
        """After a test, with its metrics."""

    def on_training_end(self, context: PhaseContext) -> None:
        """After the last epoch."""


class PhaseCallback(Callback):
    """A callback for one phase: define `__call__(context)`.

    Args:
        phase: a `Phase`, or its name.
    """

    def __init__(self, phase: Phase | str) -> None:
        names = [known.value for known in Phase]
        if not isinstance(phase, Phase) and phase not in names:
            raise ConfigError(f"there is no phase {phase!r}{did_you_mean(str(phase), names)}", "phase")
        self.phase = Phase(phase)

    def __call__(self, context: PhaseContext) -> None:
        """Act."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(context)")
