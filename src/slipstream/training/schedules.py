"""SuperGradients' learning-rate keys as schedules of a Runner."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch

from slipstream.config import options
from slipstream.errors import ConfigError
from slipstream.optim.scheduler import TorchSchedulerAdapter, _ParamScheduler
from slipstream.optim.scheduler.checks import INF, check_int
from slipstream.registry import PARAM_SCHEDULERS
from slipstream.training.lr_schedule import MODES, WARMUPS, LRSchedule, check_known
from slipstream.training.params import TrainingParams

__all__ = ["RecipeLR", "TorchLR", "lr_schedules"]

_BY_EPOCH = {"TRAIN_EPOCH_END": True, "TRAIN_BATCH_END": False, "TRAIN_BATCH_STEP": False}
"""The phases in which a scheduler of torch may step, and whether it then counts epochs."""

_PLATEAU = {"threshold_mode": "threshold_rule", "min_lr": "min_value"}
"""Our words for the arguments of torch's `ReduceLROnPlateau`, where they differ."""


@PARAM_SCHEDULERS.register_module()
class RecipeLR(_ParamScheduler):
    """The learning rates of a `LRSchedule`, stepped by iteration.

    Without an `lr_mode` it acts during the warm-up only, and leaves the rates to others afterwards.

    Args:
        optimizer: see `_ParamScheduler`; a group's own `warmup_initial_lr` goes before that of the course.
        course: a `LRSchedule` or its fields.

    Raises:
        ConfigError, UnknownNameError: naming the field that is wrong.
    """

    def __init__(self, optimizer: Any, course: LRSchedule | Mapping[str, Any]) -> None:
        self.course = options(LRSchedule, course, "course")
        end = INF if self.course.lr_mode else self.course.climbing + 1
        super().__init__(optimizer, "lr", end=end, by_epoch=False)

    @classmethod
    def build_iter_from_epoch(  # type: ignore[override]  # a course knows where it begins
        cls, optimizer: Any, *, epoch_length: int | None = None, end: int = INF, **course: Any
    ) -> RecipeLR:
        """Return the schedule of a run of `end` epochs of `epoch_length` iterations."""
        if epoch_length is None or end == INF:
            raise ConfigError("RecipeLR needs a run of a known number of epochs, of a known length")
        return cls(optimizer, {"epoch_length": epoch_length, "max_epochs": end, **course})

    def rates(self, step: int) -> list[float]:
        """Return the learning rate of every group at iteration `step` of the run; nothing moves."""
        starts = [group.get("warmup_initial_lr") for group in self._values.groups]
        pairs = zip(self.base_values, starts, strict=True)
        return [self.course.rate(step, base, start) for base, start in pairs]

    def _get_value(self) -> list[float]:
        return self.rates(self.last_step)


@PARAM_SCHEDULERS.register_module()
class TorchLR(TorchSchedulerAdapter):
    """A scheduler of `torch.optim.lr_scheduler` that waits for the end of a warm-up.

    Args:
        optimizer: a torch optimizer.
        scheduler: the name of the class.
        arguments: those of the class, without the optimizer.
        begin: epochs, or iterations, at whose ends it does not step.
        by_epoch: whether a step is an epoch or an iteration.
        end: first step that it no longer takes.
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
        """Return the schedule in iterations, with `begin` and `end` in epochs of `epoch_length` iterations."""
        check_int("epoch_length", epoch_length, 1)
        assert epoch_length is not None
        last = end if end == INF else end * epoch_length
        return cls(optimizer, **others, begin=begin * epoch_length, end=last, by_epoch=False)

    def step(self) -> None:
        """Take one step, unless it is too early."""
        if self._global_step < self.begin:
            self._global_step += 1
        else:
            super().step()


def lr_schedules(params: TrainingParams) -> list[dict[str, Any]]:
    """Return the `param_scheduler` configurations of `lr_mode`, its warm-up and its cool-down.

    Raises:
        UnknownNameError: no such mode, warm-up, or scheduler of torch.
        ConfigError: a key that the mode needs is missing, or contradicts another.
    """
    lr_mode = params.lr_mode
    if isinstance(lr_mode, Mapping):
        # The warm-up comes last: it has the last word on what a scheduler writes when it is made.
        return [_of_torch(params, lr_mode), *_recipe(params, None)]
    if lr_mode in torch.optim.lr_scheduler.__all__:
        raise ConfigError(
            f"{lr_mode} is torch's and needs its arguments: {{'{lr_mode}': {{'phase': 'TRAIN_EPOCH_END', ...}}}}",
            "training_params.lr_mode",
        )
    return _recipe(params, lr_mode)


def _recipe(params: TrainingParams, lr_mode: str | None) -> list[dict[str, Any]]:
    """Return the configuration of the schedule of our own, in a list; an empty one if it has nothing to do."""
    keys = ["lr_warmup_epochs", "lr_warmup_steps", "warmup_initial_lr"]
    mode = MODES.get(lr_mode or "")
    if mode is not None:
        keys += [*chain(*mode.needs), *mode.keys, "lr_cooldown_epochs", "batch_accumulate"]
    warms_up = bool(params.warmup_mode) and any(getattr(params, key) for key in WARMUPS.values())
    words = {"lr_mode": lr_mode, "warmup_mode": params.warmup_mode if warms_up else None}
    words |= {key: getattr(params, key) for key in keys}
    if isinstance(params.warmup_initial_lr, Mapping) or not warms_up:
        del words["warmup_initial_lr"]  # a map of them stands in the parameter groups
    check_known(params.warmup_mode, WARMUPS, "training_params.warmup_mode")
    course = options(LRSchedule, {"epoch_length": 1, "max_epochs": 1, **words}, "training_params")
    if lr_mode is None and not warms_up:
        return []
    default = LRSchedule(1, 1)
    changed = {key: value for key in words if (value := getattr(course, key)) != getattr(default, key)}
    return [{"type": "RecipeLR", "convert_to_iter_based": True, **changed}]


def _of_torch(params: TrainingParams, lr_mode: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of `{a class of torch's: {its arguments, phase, metric_name}}`."""
    name, given = next(iter(lr_mode.items()), (None, None))
    if len(lr_mode) != 1 or not isinstance(given, Mapping):
        raise ConfigError(
            f"must be {{a scheduler of torch: its arguments}}, not {lr_mode!r}", "training_params.lr_mode"
        )
    check_known(name, torch.optim.lr_scheduler.__all__, "training_params.lr_mode")
    place = f"training_params.lr_mode.{name}"
    arguments = {key: value for key, value in given.items() if key not in ("phase", "metric_name")}
    if name == "ReduceLROnPlateau":
        return _plateau(given.get("metric_name"), arguments, params.lr_warmup_epochs, place)
    phase = given.get("phase")
    word = str(getattr(phase, "name", phase)).rpartition(".")[-1].upper()
    if word not in _BY_EPOCH:
        raise ConfigError(f"must be one of {', '.join(_BY_EPOCH)}, not {phase!r}", f"{place}.phase")
    if word == "TRAIN_BATCH_STEP" and params.batch_accumulate > 1:
        raise ConfigError(
            "with batch_accumulate give TRAIN_BATCH_END, and count batches in the arguments", f"{place}.phase"
        )
    own = {"scheduler": name, "arguments": arguments, "begin": params.lr_warmup_epochs}
    return {"type": "TorchLR", **own, **({} if _BY_EPOCH[word] else {"convert_to_iter_based": True})}


def _plateau(metric: Any, arguments: Mapping[str, Any], warmup: int, place: str) -> dict[str, Any]:
    """Return our own schedule, which looks at validations, with the arguments of torch's."""
    if not isinstance(metric, str):
        raise ConfigError(f"must be the name of a metric, not {metric!r}", f"{place}.metric_name")
    own = {_PLATEAU.get(key, key): value for key, value in arguments.items() if key != "mode"}
    rule = "greater" if arguments.get("mode") == "max" else "less"
    # The validation of epoch e comes when e + 1 epochs are counted.
    return {
        "type": "ReduceOnPlateauLR",
        "monitor": metric,
        "rule": rule,
        "begin": warmup and warmup + 1,
        **own,
    }
