"""SuperGradients' phase callbacks as Runner hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from inspect import isclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from slipstream.dataset.loading.samples import SeededDataset
from slipstream.dataset.sources.base import SegmentationDataset
from slipstream.dataset.transforms.geometry import Affine, SegConvertToTensor
from slipstream.dataset.transforms.pipeline import check_transforms
from slipstream.errors import ConfigError
from slipstream.hooks import EarlyStoppingHook, Hook
from slipstream.model import unwrap_model
from slipstream.model.sliding import SlidingWindow
from slipstream.registry import HOOKS, TRANSFORMS
from slipstream.training.factories import configuration, read_factory
from slipstream.training.phases import EVENT_OF, Callback, ContextError, Phase, PhaseCallback, PhaseContext

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = [
    "Callback",
    "CallbackHook",
    "ContextError",
    "EarlyStop",
    "Phase",
    "PhaseCallback",
    "PhaseContext",
    "SlidingWindowValidationCallback",
    "callback_hooks",
    "stage_of",
]

_EVENTS_AT = {
    "before_train": ("on_training_start",),
    "before_train_epoch": ("on_train_loader_start",),
    "before_train_iter": ("on_train_batch_start",),
    "after_train_iter": ("on_train_batch_loss_end", "on_train_batch_gradient_step_end", "on_train_batch_end"),
    "after_train_epoch": ("on_train_loader_end",),
    "before_val_epoch": ("on_validation_loader_start",),
    "before_val_iter": ("on_validation_batch_start",),
    "after_val_iter": ("on_validation_batch_end",),
    "after_val_epoch": ("on_validation_loader_end",),
    "after_new_best": ("on_validation_end_best_epoch",),
    "before_average_val": ("on_average_best_models_validation_start",),
    "after_average_val": ("on_average_best_models_validation_end",),
    "before_test_epoch": ("on_test_loader_start",),
    "before_test_iter": ("on_test_batch_start",),
    "after_test_iter": ("on_test_batch_end",),
    "after_test_epoch": ("on_test_loader_end",),
    "after_train": ("on_training_end",),
}

_STEP_EVENT = "on_train_batch_gradient_step_end"
_VALIDATION_EVENTS = ("on_validation_loader_start", "on_validation_loader_end")
"""SuperGradients does not trigger these events when it validates the average of the best models."""
_EVENTS_INSIDE_STEP = ("on_train_batch_backward_end", "on_train_batch_gradient_step_start")


def stage_of(phase: Phase) -> str:
    """Return the hook stage at which callbacks for this phase are called."""
    return next(stage for stage, events in _EVENTS_AT.items() if EVENT_OF[phase] in events)


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
    if isinstance(entry, Hook):
        return entry
    try:
        if not isinstance(entry, str | Mapping):
            return CallbackHook(entry)
        name, arguments = read_factory(entry, "")
        kind, cfg = HOOKS.resolve(name), {"type": name, **arguments}
    except ConfigError as error:
        error.path = config_path + (f".{error.path}" if error.path else "")
        raise
    if isclass(kind) and issubclass(kind, Hook):
        return cfg
    return {"type": "CallbackHook", "callback": cfg}


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
            raise ConfigError(
                f"a phase callback must be a Callback, a PhaseCallback or a Hook, not {built!r}"
            )
        for event in _EVENTS_INSIDE_STEP:
            if hasattr(built, event):
                raise ConfigError(
                    f"{type(built).__name__}.{event} cannot be called because a training step is a single call. Use "
                    "clip_grad_norm to clip gradients; for other changes, subclass slipstream.optim.OptimWrapper"
                )
        self.callback = built
        events = [event for at_stage in _EVENTS_AT.values() for event in at_stage]
        self._handlers = {event: found for event in events if (found := _handler(built, event)) is not None}
        self._context: PhaseContext | None = None
        self._is_averaged = False

    def method_at(self, stage: str) -> Callable[..., None] | None:
        """Return a function that passes this stage's events to the callback, or None if no call is needed."""
        events = [event for event in _EVENTS_AT.get(stage, ()) if event in self._handlers]
        averages = stage in ("before_average_val", "after_average_val")
        if averages and (events or any(event in self._handlers for event in _VALIDATION_EVENTS)):
            return partial(self._call_for_average, stage, events)
        return partial(self._call, events) if events else None

    def _call_for_average(self, stage: str, events: Sequence[str], runner: Runner, **values: Any) -> None:
        self._is_averaged = stage == "before_average_val"
        self._call(events, runner, **values)

    def _call(self, events: Sequence[str], runner: Runner, **values: Any) -> None:
        if self._context is None or self._context.runner is not runner:
            self._context = PhaseContext(runner)
        for event in events:
            if self._is_averaged and event in _VALIDATION_EVENTS:
                continue
            if event != _STEP_EVENT or _has_stepped(runner):
                self._context.enter(event, _values(event, **values))
                self._handlers[event](self._context)
        if self._context.stop_training and runner.is_training:
            runner.train_loop.stop_training = True


def _handler(callback: Callback, event: str) -> Callable[[PhaseContext], None] | None:
    if isinstance(callback, PhaseCallback) and EVENT_OF[callback.phase] == event:
        return callback
    method: Callable[[PhaseContext], None] = getattr(callback, event)
    return None if getattr(method, "__func__", None) is getattr(Callback, event) else method


def _has_stepped(runner: Runner) -> bool:
    """Return whether the training step that has just run updated the weights."""
    assert runner.optim_wrapper is not None, "training requires an optim_wrapper"
    step = runner.iter + 1
    return step % runner.optim_wrapper.accumulative_counts == 0 or step == runner.max_iters


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
        parts = {"inputs": "inputs", "target": "targets"} if is_mapping else {"inputs": 0, "target": 1}
        values |= _additional_items(data_batch)
        values |= {"batch_idx": batch_idx} | {name: data_batch[key] for name, key in parts.items()}
    if outputs is not None and "train" in event:
        values["loss_log_items"] = outputs
    elif outputs is not None:
        values["preds"] = outputs.get("preds", outputs) if isinstance(outputs, Mapping) else outputs
    return values


def _additional_items(batch: Any) -> dict[str, Any]:
    """Return the third item of a batch (inputs, targets, dict), and its entries under their own names."""
    is_triple = isinstance(batch, tuple | list) and len(batch) == 3
    items = batch[2] if is_triple else {}
    return {**(items if isinstance(items, Mapping) else {}), "additional_batch_items": items}


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
        verbose: whether to log the best value after each validation run.
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
        if mode not in ("min", "max"):
            raise ConfigError(f"must be 'min' or 'max', not {mode!r}", "mode")
        rule = "less" if mode == "min" else "greater"
        super().__init__(monitor, rule, min_delta, strict, check_finite, patience, threshold)
        self.verbose = verbose

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Compare the metric with its best value so far."""
        super().after_val_epoch(runner, metrics)
        if self.verbose and runner.is_training:
            best = self._sign * self._best
            runs = f"{self._num_unimproved} validation run{'' if self._num_unimproved == 1 else 's'}"
            runner.logger.info(f"EarlyStop: best {self.monitor} {best:.4g}, {runs} ago")


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
        entries = enumerate(transforms_for_sliding_window or ())
        self.transforms = [_transform(entry, f"transforms_for_sliding_window[{i}]") for i, entry in entries]
        check_transforms(self.transforms)
        self.window = SlidingWindow(tuple(crop_size), tuple(stride))  # type: ignore[arg-type]
        self._undo = ExitStack()

    def before_val(self, runner: Runner) -> None:
        """Enable sliding windows and full-size images, except during training before the last epoch is complete."""
        if runner.is_training and runner.iter < runner.max_iters:
            return
        model, loop = unwrap_model(runner.model), runner.val_loop
        if not hasattr(model, "sliding_window"):
            raise ConfigError(
                f"SlidingWindowValidationCallback requires a SupervisedModel, not {type(model).__name__}"
            )
        for owner, name, value in (
            (model, "sliding_window", self.window),
            (model, "_compiled_call_impl", None),
            (loop, "dataloader", _rebuild_loader(loop.dataloader, self.transforms)),
        ):
            self._undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

    def after_val(self, runner: Runner) -> None:
        """Restore the previous state."""
        self._undo.close()


def _transform(entry: Any, config_path: str) -> Any:
    cfg = configuration(entry, config_path)
    return TRANSFORMS.build(cfg) if isinstance(cfg, Mapping) else cfg


def _rebuild_loader(loader: DataLoader[Any], transforms: Sequence[Any]) -> DataLoader[Any]:
    """Return a new loader with these transforms. In the old loader, running workers would keep the old transforms."""
    return DataLoader(
        _replace_transforms(loader.dataset, transforms),
        batch_sampler=loader.batch_sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
    )


def _replace_transforms(dataset: Any, transforms: Sequence[Any]) -> Any:
    changed = copy.copy(dataset)
    if isinstance(dataset, SeededDataset):
        changed.dataset = _replace_transforms(dataset.dataset, transforms)
        return changed
    if not isinstance(dataset, SegmentationDataset):
        raise ConfigError(
            f"SlidingWindowValidationCallback cannot replace the transforms of {type(dataset).__name__}; use a "
            "validation dataset that subclasses slipstream.dataset.SegmentationDataset"
        )
    final_transforms = [t for t in dataset.transforms if isinstance(t, Affine | SegConvertToTensor)]
    changed.transforms = list(transforms) or final_transforms
    return changed
