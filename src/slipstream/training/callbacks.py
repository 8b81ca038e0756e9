"""SuperGradients' phases, callbacks and `context`, called through a Runner hook, and the hooks of other keys."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from enum import Enum
from functools import partial
from inspect import isclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from slipstream.checkpoint import OPTIMIZER
from slipstream.checkpoint import check as check_state
from slipstream.dataset.loading.loader import build_dataloader, copied_loader
from slipstream.dataset.loading.workers import end_workers
from slipstream.dataset.sources.base import SegmentationDataset
from slipstream.dataset.transforms.geometry import Affine, SegConvertToTensor
from slipstream.dataset.transforms.pipeline import check_transforms
from slipstream.errors import ConfigError, DataError, SlipstreamError, did_you_mean
from slipstream.hooks import CheckpointHook, EarlyStoppingHook, EMAHook, Hook, SegVisualizationHook
from slipstream.model import unwrap_model
from slipstream.model.tasks import SlidingWindow
from slipstream.registry import HOOKS, TRANSFORMS
from slipstream.training.params import configuration, read_factory
from slipstream.typecheck import check

if TYPE_CHECKING:
    from slipstream.runner import Runner


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


# The hook stage of each event, in order, and the phase that corresponds to it.
_EVENTS = (
    ("before_train", "on_training_start", Phase.PRE_TRAINING),
    ("before_train_epoch", "on_train_loader_start", Phase.TRAIN_EPOCH_START),
    ("before_train_iter", "on_train_batch_start", None),
    ("after_train_iter", "on_train_batch_loss_end", Phase.TRAIN_BATCH_END),
    ("after_train_iter", "on_train_batch_gradient_step_end", Phase.TRAIN_BATCH_STEP),
    ("after_train_iter", "on_train_batch_end", None),
    ("after_train_epoch", "on_train_loader_end", Phase.TRAIN_EPOCH_END),
    ("before_val_epoch", "on_validation_loader_start", None),
    ("before_val_iter", "on_validation_batch_start", None),
    ("after_val_iter", "on_validation_batch_end", Phase.VALIDATION_BATCH_END),
    ("after_val_epoch", "on_validation_loader_end", Phase.VALIDATION_EPOCH_END),
    ("after_new_best", "on_validation_end_best_epoch", Phase.VALIDATION_END_BEST_EPOCH),
    ("before_average_val", "on_average_best_models_validation_start", None),
    ("after_average_val", "on_average_best_models_validation_end", None),
    ("before_test_epoch", "on_test_loader_start", None),
    ("before_test_iter", "on_test_batch_start", None),
    ("after_test_iter", "on_test_batch_end", Phase.TEST_BATCH_END),
    ("after_test_epoch", "on_test_loader_end", Phase.TEST_END),
    ("after_train", "on_training_end", Phase.POST_TRAINING),
)
_EVENTS_INSIDE_STEP = ("on_train_batch_backward_end", "on_train_batch_gradient_step_start")


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
        if name in _ATTRIBUTES:
            return _ATTRIBUTES[name](self.runner)
        if name == "metrics_dict" and self._event == "on_train_loader_end":
            return _train_metrics(self.runner)
        available = ", ".join(["runner", *_ATTRIBUTES, *self._values])
        raise ContextError(f"context.{name} is not available at {self._event} (available: {available})")

    def enter(self, event: str, values: dict[str, Any]) -> None:
        """Set the current event and the values that are available only at this event."""
        self._event, self._values = event, values

    @property
    def epoch(self) -> int:
        """Current epoch, counted from 0. During validation, the most recent training epoch."""
        training = self._event.startswith(("on_train_", "on_training_start"))
        return self.runner.epoch if training else max(self.runner.epoch - 1, 0)


class SGLogger:
    """`context.sg_logger`: passes values and images to the visualizer, by default for the current epoch."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None:
        """Record a scalar."""
        self.add_scalars({tag: scalar_value}, global_step)

    def add_scalars(self, tag_scalar_dict: Mapping[str, Any], global_step: int | None = None) -> None:
        """Record several scalars."""
        numbers = {tag: float(value) for tag, value in tag_scalar_dict.items()}
        self._runner.visualizer.add_scalars(numbers, self._step(global_step))

    def add_image(self, tag: str, image: Any, data_format: str = "CHW", global_step: Any = None) -> None:
        """Record an RGB image: a tensor, an array or a Pillow image (H, W, 3), uint8 or floats from 0 to 1."""
        pixels = image.detach().cpu().numpy() if isinstance(image, Tensor) else np.asarray(image)
        if data_format == "CHW" and pixels.shape[-1] != 3:
            pixels = pixels.transpose(1, 2, 0)
        if pixels.dtype != np.uint8:
            pixels = (pixels.astype(np.float64) * 255).round().clip(0, 255).astype(np.uint8)
        self._runner.visualizer.add_image(tag, np.ascontiguousarray(pixels), self._step(global_step))

    def add_images(self, tag: str, images: Any, data_format: str = "NCHW", global_step: Any = None) -> None:
        """Record several images as `tag/0`, `tag/1` and so on; see `add_image`."""
        for index, image in enumerate(images):
            self.add_image(f"{tag}/{index}", image, data_format.removeprefix("N"), global_step)

    def add_config(self, tag: str, config: Mapping[str, Any]) -> None:
        """Record a configuration."""
        self._runner.visualizer.add_config({tag: dict(config)})

    def local_dir(self) -> str:
        """Return the run's folder."""
        return self._runner.work_dir

    def __getattr__(self, name: str) -> Any:
        """Return another method of the visualizer, such as `flush`."""
        return getattr(self._runner.visualizer, name)

    def _step(self, step: int | None) -> int:
        return self._runner.epoch if step is None else int(step)


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
    "metric_to_watch": lambda runner: next(_monitors(runner), None),
}


def _monitors(runner: Runner) -> Iterator[str]:
    hooks = [hook for hook in runner.hooks if isinstance(hook, CheckpointHook)]
    return (name for hook in hooks for name in hook.monitors if name != "auto")


def _train_metrics(runner: Runner) -> dict[str, Any]:
    """Return the epoch's mean losses and training metrics as a dict."""
    runner.read_logs()
    hub, length, prefix = runner.message_hub, runner.train_loop.epoch_length, "train/"
    no_metrics = ("time", "lr", "momentum")
    kept = {k: h for k, h in hub.log_scalars.items() if not k.endswith(no_metrics) and "/lr/" not in k}
    named = {**{key: history.mean(length) for key, history in kept.items()}, **hub.runtime_info}
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
        if not isinstance(phase, Phase) and phase not in Phase.__members__:
            raise ConfigError(f"no phase is named {phase!r}{did_you_mean(phase, Phase.__members__)}", "phase")
        self.phase = Phase(phase)

    def __call__(self, context: PhaseContext) -> None:
        """Called at this callback's phase."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(context)")


def callback_hooks(entries: Sequence[Any]) -> list[Hook | dict[str, Any]]:
    """Convert `phase_callbacks` to hooks: objects become hook objects, and names become hook configurations.

    Args:
        entries: `Callback` and `Hook` objects, or entries in SuperGradients' factory syntax whose names are registered
            in HOOKS.

    Raises:
        UnknownNameError: if a name is not registered.
        ConfigError: if an entry is not a callback.
    """
    return [_hook(entry, f"training_params.phase_callbacks[{i}]") for i, entry in enumerate(entries)]


def _hook(entry: Any, config_path: str) -> Hook | dict[str, Any]:
    try:
        if isinstance(entry, str | Mapping):
            name, arguments = read_factory(entry, "")
            kind, cfg = HOOKS.resolve(name), {"type": name, **arguments}
            is_hook = isclass(kind) and issubclass(kind, Hook)
            return cfg if is_hook else {"type": "CallbackHook", "callback": cfg}
        return entry if isinstance(entry, Hook) else CallbackHook(entry)
    except ConfigError as error:
        error.path = config_path + (f".{error.path}" if error.path else "")
        raise


@HOOKS.register_module()
class CallbackHook(Hook):
    """Call a callback's methods when their events occur.

    Args:
        callback: a `Callback`, or the configuration of a `Callback` class that is registered in HOOKS.

    Raises:
        ConfigError: if `callback` is not a callback, or handles an event inside the training step.
    """

    priority = "ABOVE_NORMAL"  # runs after validation, but before EMAHook restores the trained weights

    def __init__(self, callback: Callback | Mapping[str, Any]) -> None:
        built: Any = HOOKS.build(callback) if isinstance(callback, Mapping) else callback
        if not isinstance(built, Callback):
            raise ConfigError(f"a phase callback must be a Callback or a Hook, not {built!r}")
        if inside := [event for event in _EVENTS_INSIDE_STEP if hasattr(built, event)]:
            raise ConfigError(
                f"{inside[0]} cannot be called, because a step is a single call; use clip_grad_norm"
            )
        self.callback = built
        self._handlers: dict[str, Callable[[PhaseContext], None]] = {}
        for _, event, phase in _EVENTS:
            if isinstance(built, PhaseCallback) and built.phase is phase:
                self._handlers[event] = built
            elif getattr(getattr(built, event), "__func__", None) is not getattr(Callback, event):
                self._handlers[event] = getattr(built, event)
        self._context: PhaseContext | None = None
        self._is_averaged = False

    def method_at(self, stage: str) -> Callable[..., None] | None:
        """Return a function that passes this stage's events to the callback, or None if no call is needed."""
        events = [event for at, event, _ in _EVENTS if at == stage and event in self._handlers]
        around_average = stage in ("before_average_val", "after_average_val")
        validates = around_average and any("validation" in event for event in self._handlers)
        return partial(self._call, stage, events) if events or validates else None

    def _call(self, stage: str, events: Sequence[str], runner: Runner, **values: Any) -> None:
        if stage in ("before_average_val", "after_average_val"):
            self._is_averaged = stage == "before_average_val"
        elif self._is_averaged and stage in ("before_val_epoch", "after_val_epoch"):
            return  # as in SuperGradients, when it validates the average of the best models
        if self._context is None or self._context.runner is not runner:
            self._context = PhaseContext(runner)
        for event in events:
            if event != "on_train_batch_gradient_step_end" or _has_stepped(runner):
                self._context.enter(event, _values(event, **values))
                self._handlers[event](self._context)
        if self._context.stop_training and runner.is_training:
            runner.train_loop.stop_training = True


def _has_stepped(runner: Runner) -> bool:
    """Return whether the training step that has just run updated the weights."""
    assert runner.optim_wrapper is not None, "training requires an optim_wrapper"
    return runner.optim_wrapper.ends_window(runner.iter + 1)


def _values(
    event: str,
    batch_idx: int | None = None,
    data_batch: Any = None,
    outputs: Any = None,
    metrics: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the values that are available only during this event, under SuperGradients' names."""
    values: dict[str, Any] = {} if metrics is None else {"metrics_dict": metrics}
    if batch_idx is not None:
        is_mapping = isinstance(data_batch, Mapping)
        items = {} if is_mapping or len(data_batch) != 3 else data_batch[2]
        values |= {**(items if isinstance(items, Mapping) else {}), "additional_batch_items": items}
        inputs, target = ("inputs", "targets") if is_mapping else (0, 1)
        values |= {"batch_idx": batch_idx, "inputs": data_batch[inputs], "target": data_batch[target]}
    if outputs is not None and "train" in event:
        values["loss_log_items"] = outputs
    elif outputs is not None:
        values["preds"] = outputs.get("preds", outputs) if isinstance(outputs, Mapping) else outputs
    return values


# ---- SuperGradients' built-in callbacks -----------------------------------------------------------------


@HOOKS.register_module()
class EarlyStop(EarlyStoppingHook):
    """Stop training when a validation metric stops improving.

    Args:
        phase: must be `VALIDATION_EPOCH_END`.
        monitor: name of the metric.
        mode: `min` if lower values are better, `max` if higher values are better.
        min_delta: minimum change that counts as an improvement.
        patience: number of validation runs without improvement before training stops.
        check_finite: whether to stop when the metric is NaN or infinite.
        threshold: stop as soon as the metric reaches this value.
        verbose: has no effect; the log contains each value.
        strict: whether to raise an error if the metric is missing. If False, log a warning instead.
    """

    def __init__(
        self,
        phase: Phase | str,
        monitor: str,
        mode: str = "min",
        min_delta: float = 0.0,
        patience: int = 3,
        check_finite: bool = True,
        threshold: float | None = None,
        verbose: bool = False,
        strict: bool = True,
    ) -> None:
        if phase not in (Phase.VALIDATION_EPOCH_END, Phase.VALIDATION_EPOCH_END.value):
            raise ConfigError(f"EarlyStop only supports VALIDATION_EPOCH_END, not {phase}", "phase")
        rule = "less" if check(mode, Literal["min", "max"], "mode") == "min" else "greater"
        super().__init__(monitor, rule, min_delta, strict, check_finite, patience, threshold)


@HOOKS.register_module()
class SlidingWindowValidationCallback(Hook):
    """Validate whole images with sliding windows after the last training epoch and in standalone validation runs.

    Earlier validation runs use the dataset's transforms instead, because sliding windows take several times as long.
    With sliding windows, the model runs eagerly, because compilation does not pay off in a single validation run.

    Args:
        transforms_for_sliding_window: transforms for the validation images. If empty, only the dataset's final
            transforms are kept (SegStandardize, SegNormalize, SegConvertToTensor), so images keep their full size.
        crop_size, stride: see `SlidingWindow`. Defaults: those of SuperGradients' SegFormer.
    """

    def __init__(
        self,
        transforms_for_sliding_window: Sequence[Any] = (),
        crop_size: Sequence[int] = SlidingWindow.crop_size,
        stride: Sequence[int] = SlidingWindow.stride,
    ) -> None:
        self.transforms = []
        for index, entry in enumerate(transforms_for_sliding_window or ()):
            cfg = configuration(entry, f"transforms_for_sliding_window[{index}]")
            self.transforms.append(TRANSFORMS.build(cfg) if isinstance(cfg, Mapping) else cfg)
        check_transforms(self.transforms)
        self.window = SlidingWindow(tuple(crop_size), tuple(stride))  # type: ignore[arg-type]
        self._undo = ExitStack()

    def before_val(self, runner: Runner) -> None:
        """Enable sliding windows and full-size images, except during training before the last epoch is complete."""
        if runner.is_training and runner.iter < runner.max_iters:
            return
        model, loop = unwrap_model(runner.model), runner.val_loop
        for owner, name, value in (
            (model, "sliding_window", self.window),
            (model, "_compiled_call_impl", None),
            (
                loop,
                "dataloaders",
                {k: _rebuild_loader(v, self.transforms) for k, v in loop.dataloaders.items()},
            ),
        ):
            self._undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

    def after_val(self, runner: Runner) -> None:
        """Restore the previous state."""
        self._undo.close()


def _rebuild_loader(loader: DataLoader[Any], transforms: Sequence[Any]) -> DataLoader[Any]:
    """Return a new loader with these transforms. In the old loader, running workers would keep the old transforms."""
    return copied_loader(loader, dataset=_replace_transforms(loader.dataset, transforms))


def _replace_transforms(dataset: Any, transforms: Sequence[Any]) -> Any:
    changed = copy.copy(dataset)
    if not isinstance(dataset, SegmentationDataset):
        raise ConfigError(f"SlidingWindowValidationCallback requires a SegmentationDataset, not {dataset!r}")
    final_transforms = [t for t in dataset.transforms if isinstance(t, Affine | SegConvertToTensor)]
    changed.transforms = list(transforms) or final_transforms
    return changed


@HOOKS.register_module()
class BinarySegmentationVisualizationCallback(SegVisualizationHook):
    """Save pictures of the image, the ground truth and the prediction of validation samples.

    Args:
        phase, batch_idx: have no effect; the samples are spread across the validation data.
        freq: number of validation runs between two pictures.
        last_img_idx_in_batch: number of samples; -1 for 4 samples.
    """

    def __init__(
        self, phase: Phase | str, freq: int, batch_idx: int = 0, last_img_idx_in_batch: int = -1
    ) -> None:
        super().__init__(4 if last_img_idx_in_batch < 0 else last_img_idx_in_batch, freq)


# ---- hooks for keys of `training_params` ------------------------------------------------------------------


@HOOKS.register_module()
class NewOptimizerHook(Hook):
    """Resume the weights, the epoch and the learning rates, but start with a new optimizer state."""

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        """Replace the saved optimizer state with the initial state, but keep the saved learning rates."""
        if not runner.checkpoints.resuming or "optimizer" not in checkpoint:
            return
        assert runner.optim_wrapper is not None, "training requires an optim_wrapper"
        initial_state = runner.optim_wrapper.state_dict()
        check_state(checkpoint["optimizer"], OPTIMIZER, "the resumed checkpoint", "optimizer")
        groups = checkpoint["optimizer"]["param_groups"]
        # Not strict, because the schedulers check the number of groups.
        for own, saved in zip(initial_state["param_groups"], groups, strict=False):
            own["lr"] = saved.get("lr", own["lr"])
        checkpoint["optimizer"] = initial_state


class PrePredictionHook(Hook):
    """Call a function with each training batch after its transfer to the device, right before the training step.

    Args:
        callback: `callback(inputs, targets, batch_idx)` returns the new inputs and targets.
    """

    def __init__(self, callback: Callable[[Any, Any, int], tuple[Any, Any]]) -> None:
        self.callback = callback

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """Replace the inputs and targets of the batch with the function's results."""
        model: Any = unwrap_model(runner.model)
        batch = model.data_preprocessor(data_batch, True)
        if isinstance(data_batch, dict):
            inputs, targets = self.callback(batch["inputs"], batch["targets"], batch_idx)
            data_batch.clear()
            data_batch.update({**batch, "inputs": inputs, "targets": targets})
        elif isinstance(data_batch, list):
            data_batch[:] = [*self.callback(batch[0], batch[1], batch_idx), *batch[2:]]
        else:
            raise DataError(
                "pre_prediction_callback requires batches that are dicts or lists; change collate_fn"
            )


class TestLoadersHook(Hook):
    """Evaluate additional datasets during training with the Runner's test loop.

    The Runner must have a test loop. The hook uses the metrics of that loop, with the dataset's name as a prefix.

    Args:
        loaders: data loaders by name.
        interval: number of epochs between evaluations.
    """

    __test__ = False  # prevents pytest from collecting this class
    priority = "LOWEST"  # runs after the checkpoint is written

    def __init__(self, loaders: Mapping[str, Any], interval: int = 1) -> None:
        self.loaders = dict(loaders)
        self.interval = interval

    def before_train(self, runner: Runner) -> None:
        """Rebuild the loaders with the run's seed."""
        for name, loader in self.loaders.items():
            self.loaders[name] = build_dataloader(loader, runner.seed, f"test_loaders.{name}", training=False)

    def after_train_epoch(self, runner: Runner) -> None:
        """Evaluate all loaders every `interval` epochs."""
        if not self.every_n_epochs(runner, self.interval):
            return
        loop = runner.test_loop
        own = loop.dataloaders, loop.evaluators
        for name, loader in self.loaders.items():
            loop.dataloaders, loop.evaluators = {name: loader}, {name: own[1][""]}
            loop.run()
        loop.dataloaders, loop.evaluators = own

    def after_train(self, runner: Runner) -> None:
        """Terminate the loaders' worker processes."""
        for loader in self.loaders.values():
            end_workers(loader)


class HistoryHook(Hook):
    """Record the metrics of each validation run during training."""

    priority = "LOWEST"

    def __init__(self) -> None:
        self.history: list[dict[str, float]] = []

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Append the metrics and the number of completed epochs."""
        if runner.is_training:
            self.history.append({"epoch": runner.epoch, **(metrics or {})})
