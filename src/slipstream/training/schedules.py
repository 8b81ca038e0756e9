"""Translate SuperGradients' learning rate keys into schedules for a Runner."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch

from slipstream.config import options
from slipstream.errors import ConfigError
from slipstream.optim.scheduler import ReduceOnPlateauLR, TorchSchedulerAdapter, _ParamScheduler
from slipstream.optim.scheduler.base import INF, check_int
from slipstream.registry import PARAM_SCHEDULERS
from slipstream.training.lr_schedule import MODES, WARMUPS, LRSchedule, check_known
from slipstream.training.params import TrainingParams
from slipstream.training.watched import train_metric, watched_value

__all__ = ["RecipeLR", "TorchLR", "TrainPlateauLR", "lr_schedules"]

_BY_EPOCH = {"TRAIN_EPOCH_END": True, "TRAIN_BATCH_END": False, "TRAIN_BATCH_STEP": False}
"""Phases at which a torch scheduler may step, and whether each step corresponds to an epoch."""

_PLATEAU = {"threshold_mode": "threshold_rule", "min_lr": "min_value"}
"""Maps arguments of torch's `ReduceLROnPlateau` to those of `ReduceOnPlateauLR` that have a different name."""


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
        self.schedule = options(LRSchedule, schedule, "schedule")
        if self.schedule.lr_mode is None and self.schedule.warmup_batches == 1:
            raise ConfigError(
                "as in SuperGradients, a warm-up of one step never reaches initial_lr; use at least 2 steps (the limit "
                "is one epoch), set lr_mode, or remove the warm-up",
                "lr_warmup_steps",
            )
        end = INF if self.schedule.lr_mode else self.schedule.warmup_iters + 1
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
        by_epoch: whether to step after each epoch instead of after each iteration.
        end: first epoch or iteration in which the scheduler no longer steps.
    """

    def __init__(
        self,
        optimizer: Any,
        scheduler: str,
        arguments: Mapping[str, Any],
        begin: int = 0,
        by_epoch: bool = True,
        end: int = INF,
    ) -> None:
        super().__init__(getattr(torch.optim.lr_scheduler, scheduler)(optimizer, **arguments), by_epoch, end)
        self.begin = begin

    @classmethod
    def build_iter_from_epoch(
        cls, optimizer: Any, *, begin: int = 0, end: int = INF, epoch_length: int | None = None, **others: Any
    ) -> TorchLR:
        """Convert `begin` and `end` from epochs to iterations, and return a per-iteration scheduler."""
        check_int("epoch_length", epoch_length, 1)
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
    lr_mode = params.lr_mode
    if isinstance(lr_mode, Mapping):
        # The warm-up comes last, so that it overrides the rates that the torch scheduler sets when it is built.
        return [_torch_schedule(params, lr_mode), *_recipe_schedule(params, None)]
    if lr_mode in torch.optim.lr_scheduler.__all__:
        raise ConfigError(
            f"{lr_mode} is a torch scheduler and requires arguments, as in "
            f"{{'{lr_mode}': {{'phase': 'TRAIN_EPOCH_END', ...}}}}",
            "training_params.lr_mode",
        )
    return _recipe_schedule(params, lr_mode)


def _recipe_schedule(params: TrainingParams, lr_mode: str | None) -> list[dict[str, Any]]:
    """Return a list with the configuration of Slipstream's own schedule, or an empty list if it is not needed."""
    keys = ["lr_warmup_epochs", "lr_warmup_steps", "warmup_initial_lr"]
    mode = MODES.get(lr_mode or "")
    if mode is not None:
        keys += [*chain(*mode.required), *mode.keys, "lr_cooldown_epochs", "batch_accumulate"]
    warms_up = bool(params.warmup_mode) and any(getattr(params, key) for key in WARMUPS.values())
    fields = {"lr_mode": lr_mode, "warmup_mode": params.warmup_mode if warms_up else None}
    fields |= {key: getattr(params, key) for key in keys}
    if isinstance(params.warmup_initial_lr, Mapping) or not warms_up:
        del fields["warmup_initial_lr"]  # the parameter groups contain the values for each prefix
    check_known(params.warmup_mode, WARMUPS, "training_params.warmup_mode")
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
        raise ConfigError(
            f"must be {{torch scheduler: {{arguments}}}}, not {lr_mode!r}", "training_params.lr_mode"
        )
    check_known(name, torch.optim.lr_scheduler.__all__, "training_params.lr_mode")
    config_path = f"training_params.lr_mode.{name}"
    arguments = {key: value for key, value in own_keys.items() if key not in ("phase", "metric_name")}
    phase = own_keys.get("phase")
    phase_name = None if phase is None else str(getattr(phase, "name", phase)).rpartition(".")[-1].upper()
    if name == "ReduceLROnPlateau":
        return _plateau(own_keys.get("metric_name"), phase_name, arguments, params, config_path)
    if phase_name not in _BY_EPOCH:
        raise ConfigError(f"must be one of {', '.join(_BY_EPOCH)}, not {phase!r}", f"{config_path}.phase")
    if phase_name == "TRAIN_BATCH_STEP" and params.batch_accumulate > 1:
        raise ConfigError(
            "does not support batch_accumulate; use TRAIN_BATCH_END, and specify the arguments in batches",
            f"{config_path}.phase",
        )
    own = {"scheduler": name, "arguments": arguments, "begin": params.lr_warmup_epochs}
    return {"type": "TorchLR", **own, **({} if _BY_EPOCH[phase_name] else {"convert_to_iter_based": True})}


def _plateau(
    metric: Any, phase: str | None, arguments: Mapping[str, Any], params: TrainingParams, config_path: str
) -> dict[str, Any]:
    """Return the configuration of Slipstream's plateau schedule for the arguments of torch's `ReduceLROnPlateau`."""
    if not isinstance(metric, str):
        raise ConfigError(f"must be the name of a metric, not {metric!r}", f"{config_path}.metric_name")
    if phase not in (None, "TRAIN_EPOCH_END", "VALIDATION_EPOCH_END"):
        raise ConfigError(
            f"must be VALIDATION_EPOCH_END, or TRAIN_EPOCH_END for a training metric, not {phase}",
            f"{config_path}.phase",
        )
    monitored = {"rule": "greater" if arguments.get("mode") == "max" else "less"} | {
        _PLATEAU.get(key, key): value for key, value in arguments.items() if key != "mode"
    }
    warmup, path = params.lr_warmup_epochs, f"{config_path}.metric_name"
    if phase == "TRAIN_EPOCH_END":
        monitor = train_metric(metric, params, path)
        return {"type": "TrainPlateauLR", "monitor": monitor, "begin": warmup, **monitored}
    # When validation runs for epoch e, the schedule has already counted e + 1 epochs.
    begin = warmup and warmup + 1
    monitor = watched_value(metric, params, path).name
    return {"type": "ReduceOnPlateauLR", "monitor": monitor, "begin": begin, **monitored}
