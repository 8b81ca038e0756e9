"""SuperGradients' learning rate keys as schedules for a Runner."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from slipstream.config import options
from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.optim.scheduler import ReduceOnPlateauLR, TorchSchedulerAdapter, _ParamScheduler
from slipstream.optim.scheduler.base import INF, check_int
from slipstream.registry import PARAM_SCHEDULERS
from slipstream.training.losses import train_metric, watched_value
from slipstream.training.params import TrainingParams

__all__ = ["LRSchedule", "RecipeLR", "TorchLR", "TrainPlateauLR", "lr_schedules"]

# Warm-up modes, and the key that sets the length of the warm-up in each mode.
_WARMUPS = {"LinearEpochLRWarmup": "lr_warmup_epochs", "LinearBatchLRWarmup": "lr_warmup_steps"}
# Values of `lr_mode`, and the keys that each requires: exactly one of the keys that | separates.
_MODES: Mapping[str, tuple[str, ...]] = {
    "StepLRScheduler": ("lr_updates|step_lr_update_freq", "lr_decay_factor"),
    "PolyLRScheduler": (),
    "CosineLRScheduler": (),
    "ExponentialLRScheduler": ("lr_decay_factor",),
    "FunctionLRScheduler": ("lr_schedule_function",),
}
# Phases at which a torch scheduler may step, and whether each step corresponds to an epoch.
_BY_EPOCH = {"TRAIN_EPOCH_END": True, "TRAIN_BATCH_END": False, "TRAIN_BATCH_STEP": False}
# Maps arguments of torch's `ReduceLROnPlateau` to those of `ReduceOnPlateauLR` that have a different name.
_PLATEAU = {"threshold_mode": "threshold_rule", "min_lr": "min_value"}


@dataclass(frozen=True)
class LRSchedule:
    """The learning rate at iteration t as a function of t and the initial rate, as in SuperGradients 3.7.

    The rate changes after each optimizer step, as a function of the index of the step's last batch:
    b = A floor(t / A) - 1 with A = `batch_accumulate`. The rate is constant during the cool-down. With L batches per
    epoch, W warm-up epochs, C cool-down epochs, initial rate i, s = b - W L and S = (max_epochs - W - C) L:

    - `PolyLRScheduler`: i (1 - s / S)^0.9
    - `CosineLRScheduler`: i (r + (1 - r) (1 + cos(pi s / (S + 1))) / 2) with r = `cosine_final_lr_ratio`. A
      batch-based warm-up reduces s and S by its number of steps.
    - `ExponentialLRScheduler`: i `lr_decay_factor`^(s / L)
    - `StepLRScheduler`: i `lr_decay_factor`^n, where n is the number of entries in `lr_updates` that are not greater
      than the index of the last completed epoch (counted from 0). With `step_lr_update_freq` f, the updates are
      ceil(f k), k = 1, 2, ..., between warm-up and cool-down.
    - `FunctionLRScheduler`: `lr_schedule_function(initial_lr=i, epoch=b // L - W, iter=b % L, max_epoch=S / L,
      iters_per_epoch=L)`

    `LinearEpochLRWarmup` increases the rate every epoch from `warmup_initial_lr` (default: i / (W + 1)) to i in epoch
    W. `LinearBatchLRWarmup` increases it every batch (default: from 0) to i in the last of min(`lr_warmup_steps`, L)
    warm-up batches. If the warm-up lasts a single batch, the rate keeps its first value until `lr_mode` changes it. An
    initial rate of 0 stays 0. One case differs from SuperGradients, where the rate of a cosine schedule after a
    batch-based warm-up increases again during the cool-down.

    Raises:
        ConfigError, UnknownNameError: if a key is invalid or missing, or conflicts with another key.
    """

    epoch_length: int
    max_epochs: int
    lr_mode: str | None = None
    warmup_mode: str | None = None
    lr_warmup_epochs: int = 0
    lr_warmup_steps: int = 0
    warmup_initial_lr: float | None = None
    lr_cooldown_epochs: int = 0
    batch_accumulate: int = 1
    lr_updates: list[Any] = field(default_factory=list)
    step_lr_update_freq: float | None = None
    lr_decay_factor: float | None = None
    cosine_final_lr_ratio: float = 0.01
    lr_schedule_function: Callable[..., float] | None = None

    def __post_init__(self) -> None:
        for name in ("lr_warmup_epochs", "lr_warmup_steps", "lr_cooldown_epochs", "batch_accumulate"):
            check_int(name, getattr(self, name), int(name == "batch_accumulate"))
        _check_known(self.lr_mode, _MODES, "lr_mode")
        _check_known(self.warmup_mode, _WARMUPS, "warmup_mode")
        if self.lr_warmup_steps and self.warmup_mode != "LinearBatchLRWarmup":
            raise ConfigError("requires warmup_mode 'LinearBatchLRWarmup'", "lr_warmup_steps")
        for keys in _MODES.get(self.lr_mode or "", ()):
            if sum(bool(getattr(self, key)) for key in keys.split("|")) != 1:
                raise ConfigError(f"exactly one is required by {self.lr_mode}", keys.replace("|", " or "))

    def rate(self, step: int, initial: float, start: float | None = None) -> float:
        """Return the rate at iteration `step`. `start` overrides `warmup_initial_lr`."""
        start = self.warmup_initial_lr if start is None else start
        if initial == 0:
            return 0.0
        if step < self.warmup_batches:
            return _interpolate(start or 0.0, initial, step, self.warmup_batches - 1)
        batch = self._last_update(step)
        first = max(self.lr_warmup_epochs * self.epoch_length, self.warmup_batches - 1)
        if self.lr_mode == "CosineLRScheduler":
            first = max(first, self.lr_warmup_steps)
        if self.lr_mode is not None and batch >= first:
            return self._decayed(batch, initial)
        if self.warmup_epochs:
            start = initial / (self.warmup_epochs + 1) if start is None else start
            return _interpolate(start, initial, step // self.epoch_length, self.warmup_epochs)
        # A warm-up of one batch keeps its first value.
        return (start or 0.0) if self.warmup_batches == 1 else initial

    @property
    def warmup_epochs(self) -> int:
        """Number of epochs in an epoch-based warm-up."""
        return self.lr_warmup_epochs if self.warmup_mode == "LinearEpochLRWarmup" else 0

    @property
    def warmup_batches(self) -> int:
        """Number of batches in a batch-based warm-up."""
        return min(self.lr_warmup_steps, self.epoch_length)

    @property
    def end_epoch(self) -> int:
        """First epoch of the cool-down."""
        return self.max_epochs - self.lr_cooldown_epochs

    def _last_update(self, step: int) -> int:
        """Return the index of the batch after which the rate last changed, or a negative number if there is none."""
        if self.lr_mode == "StepLRScheduler":
            return step // self.epoch_length * self.epoch_length - 1
        step = min(step, self.end_epoch * self.epoch_length)
        return step // self.batch_accumulate * self.batch_accumulate - 1

    def _decayed(self, batch: int, initial: float) -> float:
        """Return the rate of `lr_mode` after `batch`; see the class for the formulas."""
        length, warmup, factor = self.epoch_length, self.lr_warmup_epochs, self.lr_decay_factor or 0.0
        done, total = batch - warmup * length, (self.end_epoch - warmup) * length
        if self.lr_mode == "PolyLRScheduler":
            return float(initial * (1 - done / total) ** 0.9)
        if self.lr_mode == "CosineLRScheduler":
            done, total = max(done - self.lr_warmup_steps, 0), total - self.lr_warmup_steps
            cosine = (1 + math.cos(math.pi * done / (total + 1))) / 2
            return initial * (self.cosine_final_lr_ratio + (1 - self.cosine_final_lr_ratio) * cosine)
        if self.lr_mode == "ExponentialLRScheduler":
            return float(initial * factor ** (done / length))
        if self.lr_mode == "StepLRScheduler":
            return float(initial * factor ** sum(update <= batch // length for update in self._updates()))
        assert self.lr_schedule_function is not None
        return self.lr_schedule_function(
            initial_lr=initial,
            epoch=batch // length - warmup,
            iter=batch % length,
            max_epoch=self.end_epoch - warmup,
            iters_per_epoch=length,
        )

    def _updates(self) -> Iterable[Any]:
        """Return the epochs after which `StepLRScheduler` changes the rate."""
        if not self.step_lr_update_freq:
            return self.lr_updates
        epochs = (math.ceil(self.step_lr_update_freq * k) for k in range(1, self.end_epoch))
        return [epoch for epoch in epochs if self.lr_warmup_epochs <= epoch < self.end_epoch]


def _check_known(name: str | None, known: Iterable[str], key: str) -> None:
    """Raise `UnknownNameError` for `key` unless `name` is None or in `known`."""
    if name is not None and name not in (names := list(known)):
        raise UnknownNameError(f"no '{name}' exists{did_you_mean(name, names)} (available: {names})", key)


def _interpolate(start: float, end: float, step: int, steps: int) -> float:
    """Interpolate linearly from `start` to `end` over `steps` steps. The result is `end` after the last step."""
    return end if step >= steps > 0 else start + (end - start) * step / max(steps, 1)


@PARAM_SCHEDULERS.register_module()
class RecipeLR(_ParamScheduler):
    """Sets the learning rates after each iteration, as specified by an `LRSchedule`.

    Without `lr_mode`, it sets the learning rates only during warm-up; other schedulers set them afterwards.

    Args:
        optimizer: see `_ParamScheduler`. A parameter group's `warmup_initial_lr` overrides the schedule's value.
        schedule: an `LRSchedule` or a dict of its fields.

    Raises:
        ConfigError, UnknownNameError: if a field is invalid. The message names the field.
    """

    def __init__(self, optimizer: Any, schedule: LRSchedule | Mapping[str, Any]) -> None:
        self.schedule = schedule = options(LRSchedule, schedule, "schedule")
        if schedule.lr_mode is None and schedule.warmup_batches == 1:
            raise ConfigError("one step never reaches initial_lr; use at least 2", "lr_warmup_steps")
        warmup = max(schedule.warmup_epochs * schedule.epoch_length, schedule.warmup_batches)
        if 0 < warmup >= schedule.end_epoch * schedule.epoch_length:
            logging.getLogger("slipstream").warning(
                "LR warm-up and cool-down cover the whole run; reduce them"
            )
        end = INF if schedule.lr_mode else warmup + 1
        super().__init__(optimizer, "lr", end=end, by_epoch=False)

    @classmethod
    def build_iter_from_epoch(  # type: ignore[override]  # `begin` follows from the LR schedule
        cls, optimizer: Any, *, epoch_length: int | None = None, end: int = INF, **schedule: Any
    ) -> RecipeLR:
        """Return the schedule for a run of `end` epochs with `epoch_length` iterations each."""
        if epoch_length is None or end == INF:
            raise ConfigError("RecipeLR requires a known number of epochs and a known epoch length")
        return cls(optimizer, {"epoch_length": epoch_length, "max_epochs": end, **schedule})

    def rates(self, step: int) -> list[float]:
        """Return the learning rate of each group at iteration `step`, without changing any state."""
        starts = [group.get("warmup_initial_lr") for group in self._values.groups]
        pairs = zip(self.base_values, starts, strict=True)
        return [self.schedule.rate(step, base, start) for base, start in pairs]

    def _get_value(self) -> list[float]:
        return self.rates(self.last_step)


@PARAM_SCHEDULERS.register_module()
class TorchLR(TorchSchedulerAdapter):
    """A scheduler from `torch.optim.lr_scheduler` that starts after the warm-up.

    Args:
        optimizer: a torch optimizer.
        scheduler: name of the scheduler class.
        arguments: constructor arguments of the class, except the optimizer.
        begin: number of epochs or iterations before the scheduler starts to step.
        options: `by_epoch` and `end`; see `TorchSchedulerAdapter`.
    """

    def __init__(
        self, optimizer: Any, scheduler: str, arguments: Mapping[str, Any], begin: int = 0, **options: Any
    ) -> None:
        super().__init__(getattr(torch.optim.lr_scheduler, scheduler)(optimizer, **arguments), **options)
        self.begin = begin

    @classmethod
    def build_iter_from_epoch(
        cls, optimizer: Any, *, begin: int = 0, end: int = INF, epoch_length: int | None = None, **others: Any
    ) -> TorchLR:
        """Convert `begin` and `end` from epochs to iterations, and return a per-iteration scheduler."""
        assert epoch_length is not None
        end_iter = end if end == INF else end * epoch_length
        return cls(optimizer, **others, begin=begin * epoch_length, end=end_iter, by_epoch=False)

    def step(self) -> None:
        """Step the scheduler if the warm-up is complete."""
        if self._global_step < self.begin:
            self._global_step += 1
        else:
            super().step()


@PARAM_SCHEDULERS.register_module()
class TrainPlateauLR(ReduceOnPlateauLR):
    """A `ReduceOnPlateauLR` that monitors a training metric, which `TrainMetricsHook` passes to `evaluate`."""

    def step(self, metrics: Mapping[str, Any] | None = None) -> None:
        """Count an epoch. A call with the `metrics` of a validation run has no effect."""
        if metrics is None:
            super().step()

    def evaluate(self, metrics: Mapping[str, Any]) -> None:
        """Process the training metrics of an epoch, before this epoch is counted.

        Raises:
            ConfigError: if `metrics` does not contain `monitor`.
        """
        super().step(metrics)


def lr_schedules(params: TrainingParams) -> list[dict[str, Any]]:
    """Return the `param_scheduler` configurations for `lr_mode`, warm-up and cool-down.

    Raises:
        UnknownNameError: if the mode, the warm-up or the torch scheduler is unknown.
        ConfigError: if a required key is missing, or two keys conflict.
    """
    if isinstance(params.lr_mode, Mapping):
        # The warm-up comes last, so that it overrides the rates that the torch scheduler sets when it is built.
        return [_torch_schedule(params, params.lr_mode), *_recipe_schedule(params, None)]
    return _recipe_schedule(params, params.lr_mode)


def _recipe_schedule(params: TrainingParams, lr_mode: str | None) -> list[dict[str, Any]]:
    """Return a list with the configuration of Slipstream's own schedule, or an empty list if it is not needed."""
    _check_known(params.warmup_mode, _WARMUPS, "training_params.warmup_mode")
    warms_up = bool(params.warmup_mode) and any(getattr(params, key) for key in _WARMUPS.values())
    keys = ["lr_warmup_epochs", "lr_warmup_steps"]
    if warms_up and not isinstance(params.warmup_initial_lr, Mapping):
        keys.append("warmup_initial_lr")  # otherwise, the parameter groups contain the values for each prefix
    if lr_mode is not None:
        required = chain(*(names.split("|") for names in _MODES.get(lr_mode, ())))
        keys += [*required, "cosine_final_lr_ratio", "lr_cooldown_epochs", "batch_accumulate"]
    fields = {"lr_mode": lr_mode, "warmup_mode": params.warmup_mode if warms_up else None}
    fields |= {key: getattr(params, key) for key in keys}
    schedule = options(LRSchedule, {"epoch_length": 1, "max_epochs": 1, **fields}, "training_params")
    if lr_mode is None and not warms_up:
        return []
    default = LRSchedule(1, 1)
    changed = {key: value for key in fields if (value := getattr(schedule, key)) != getattr(default, key)}
    return [{"type": "RecipeLR", "convert_to_iter_based": True, **changed}]


def _torch_schedule(params: TrainingParams, lr_mode: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scheduler configuration for an `lr_mode` of the form `{torch scheduler class: {arguments, ...}}`."""
    name, own_keys = next(iter(lr_mode.items()), (None, None))
    if len(lr_mode) != 1 or not isinstance(own_keys, Mapping):
        raise ConfigError("must be {torch scheduler: {arguments}}", "training_params.lr_mode")
    _check_known(name, torch.optim.lr_scheduler.__all__, "training_params.lr_mode")
    config_path = f"training_params.lr_mode.{name}"
    arguments = {key: value for key, value in own_keys.items() if key not in ("phase", "metric_name")}
    phase = own_keys.get("phase")  # a `Phase` or its name
    phase_name = None if phase is None else str(getattr(phase, "name", phase)).rpartition(".")[-1].upper()
    if name == "ReduceLROnPlateau":
        return _plateau(own_keys.get("metric_name"), phase_name, arguments, params, config_path)
    if phase_name not in _BY_EPOCH:
        raise ConfigError(f"must be one of {', '.join(_BY_EPOCH)}, not {phase!r}", f"{config_path}.phase")
    if phase_name == "TRAIN_BATCH_STEP" and params.batch_accumulate > 1:
        raise ConfigError("does not support batch_accumulate; use TRAIN_BATCH_END", f"{config_path}.phase")
    own = {"scheduler": name, "arguments": arguments, "begin": params.lr_warmup_epochs}
    return {"type": "TorchLR", **own, **({} if _BY_EPOCH[phase_name] else {"convert_to_iter_based": True})}


def _plateau(
    metric: Any, phase: str | None, arguments: Mapping[str, Any], params: TrainingParams, config_path: str
) -> dict[str, Any]:
    """Return the configuration of Slipstream's plateau schedule for the arguments of torch's `ReduceLROnPlateau`."""
    path = f"{config_path}.metric_name"
    if not isinstance(metric, str):
        raise ConfigError(f"must be the name of a metric, not {metric!r}", path)
    if phase not in (None, "TRAIN_EPOCH_END", "VALIDATION_EPOCH_END"):
        raise ConfigError(f"must be the end of an epoch, not {phase}", f"{config_path}.phase")
    monitored = {"rule": "greater" if arguments.get("mode") == "max" else "less"} | {
        _PLATEAU.get(key, key): value for key, value in arguments.items() if key != "mode"
    }
    warmup = params.lr_warmup_epochs
    if phase == "TRAIN_EPOCH_END":
        monitor = train_metric(metric, params, path)
        return {"type": "TrainPlateauLR", "monitor": monitor, "begin": warmup, **monitored}
    # When validation runs for epoch e, the schedule has already counted e + 1 epochs.
    begin, monitor = warmup and warmup + 1, watched_value(metric, params, path).name
    return {"type": "ReduceOnPlateauLR", "monitor": monitor, "begin": begin, **monitored}
