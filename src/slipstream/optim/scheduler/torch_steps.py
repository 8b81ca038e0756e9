"""Determine whether torch schedulers step after each epoch or each iteration, and how long their schedules are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from slipstream.errors import ConfigError
from slipstream.optim.scheduler.one_cycle import OneCycleParamScheduler

__all__ = ["counts_epochs", "last_change"]

_STEP_PER_BATCH = (lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR)
_STEP_PER_EPOCH = (
    lr_scheduler.StepLR,
    lr_scheduler.MultiStepLR,
    lr_scheduler.ConstantLR,
    lr_scheduler.LinearLR,
    lr_scheduler.ExponentialLR,
    lr_scheduler.PolynomialLR,
    lr_scheduler.CosineAnnealingLR,
)
_LAST_CHANGE: Mapping[type, str] = {
    OneCycleParamScheduler: "total_steps",
    lr_scheduler.OneCycleLR: "total_steps",
    lr_scheduler.StepLR: "step_size",
    lr_scheduler.ConstantLR: "total_iters",
    lr_scheduler.LinearLR: "total_iters",
    lr_scheduler.PolynomialLR: "total_iters",
    lr_scheduler.CosineAnnealingLR: "T_max",
}
"""For each class, the argument that sets the length of the schedule; see `last_change`."""


def counts_epochs(scheduler: LRScheduler) -> bool:
    """Return whether the torch documentation recommends calling the scheduler's `step` after each epoch.

    Raises:
        ConfigError: the documentation does not specify when to call `step`, so the user must set `by_epoch`.
    """
    units = _units(scheduler)
    if units in ({True}, {False}):
        return units == {True}
    name = type(scheduler).__name__
    reason = (
        "combines schedulers that step after each epoch with others that step after each iteration"
        if units == {True, False}
        else "can step after each epoch or after each iteration"
    )
    raise ConfigError(
        f"{name} {reason}; set by_epoch to True (step after each epoch) or False (step after each iteration). In a "
        "configuration, add the by_epoch key; for a scheduler object, pass dict(scheduler=..., by_epoch=...)"
    )


def _units(scheduler: LRScheduler) -> set[bool | None]:
    """Return the set of `by_epoch` values of `scheduler`, or of the schedulers that it combines (None: unknown)."""
    if isinstance(scheduler, lr_scheduler.SequentialLR | lr_scheduler.ChainedScheduler):
        return {unit for part in scheduler._schedulers for unit in _units(part)}
    if isinstance(scheduler, _STEP_PER_BATCH):
        return {False}
    return {True} if isinstance(scheduler, _STEP_PER_EPOCH) else {None}


def last_change(scheduler: Any) -> tuple[str, int] | None:
    """Return the name and value of the argument that sets the schedule's length, or None if there is none.

    The length is the number of steps until the schedule is complete or first changes the learning rate.
    """
    name = next((name for kind, name in _LAST_CHANGE.items() if isinstance(scheduler, kind)), None)
    return None if name is None else (name, int(getattr(scheduler, name)))
