"""SuperGradients' learning rate schedules in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.optim.scheduler.base import check_int

__all__ = ["MODES", "WARMUPS", "LRSchedule", "check_known"]

WARMUPS = {"LinearEpochLRWarmup": "lr_warmup_epochs", "LinearBatchLRWarmup": "lr_warmup_steps"}
"""Warm-up modes, and the key that sets the length of the warm-up in each mode."""


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
        for name in ("epoch_length", "max_epochs", "batch_accumulate"):
            check_int(name, getattr(self, name), 1)
        for name in ("lr_warmup_epochs", "lr_warmup_steps", "lr_cooldown_epochs"):
            check_int(name, getattr(self, name), 0)
        check_known(self.lr_mode, MODES, "lr_mode")
        check_known(self.warmup_mode, WARMUPS, "warmup_mode")
        if self.lr_warmup_steps and self.warmup_mode != "LinearBatchLRWarmup":
            raise ConfigError(
                f"requires warmup_mode 'LinearBatchLRWarmup', not {self.warmup_mode!r}", "lr_warmup_steps"
            )
        for alternatives in MODES[self.lr_mode].required if self.lr_mode else ():
            found = [key for key in alternatives if getattr(self, key)]
            if not found:
                raise ConfigError(f"is required by lr_mode '{self.lr_mode}'", " or ".join(alternatives))
            if len(found) > 1:
                raise ConfigError(f"cannot be combined with {found[0]}; remove one of them", found[1])

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
            return MODES[self.lr_mode].rate(self, batch, initial)
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
    def warmup_iters(self) -> int:
        """Number of warm-up iterations."""
        return max(self.warmup_epochs * self.epoch_length, self.warmup_batches)

    @property
    def is_warmup_only(self) -> bool:
        """Whether warm-up and cool-down take up the whole run."""
        between = self.end_epoch * self.epoch_length - self.warmup_iters
        return self.warmup_iters > 0 and between <= 0

    @property
    def end_epoch(self) -> int:
        """First epoch of the cool-down."""
        return self.max_epochs - self.lr_cooldown_epochs

    @cached_property
    def updates(self) -> list[Any]:
        """Epochs after which `StepLRScheduler` changes the rate."""
        if not self.step_lr_update_freq:
            return self.lr_updates
        epochs = (math.ceil(self.step_lr_update_freq * k) for k in range(1, self.end_epoch))
        return [epoch for epoch in epochs if self.lr_warmup_epochs <= epoch < self.end_epoch]

    def _last_update(self, step: int) -> int:
        """Return the index of the batch after which the rate last changed, or a negative number if there is none."""
        if self.lr_mode == "StepLRScheduler":
            return step // self.epoch_length * self.epoch_length - 1
        step = min(step, self.end_epoch * self.epoch_length)
        return step // self.batch_accumulate * self.batch_accumulate - 1

    def _decay(self, batch: int, skip: int = 0) -> tuple[int, int]:
        """Return the number of completed decay batches at `batch`, and the total number of decay batches."""
        total = (self.end_epoch - self.lr_warmup_epochs) * self.epoch_length
        return batch - self.lr_warmup_epochs * self.epoch_length - skip, total - skip

    def _poly(self, batch: int, initial: float) -> float:
        done, total = self._decay(batch)
        return float(initial * (1 - done / total) ** 0.9)

    def _cosine(self, batch: int, initial: float) -> float:
        done, total = self._decay(batch, skip=self.lr_warmup_steps)
        if done <= 0:
            return initial
        factor = (1 + math.cos(math.pi * done / (total + 1))) / 2
        return initial * (self.cosine_final_lr_ratio + (1 - self.cosine_final_lr_ratio) * factor)

    def _exponential(self, batch: int, initial: float) -> float:
        assert self.lr_decay_factor is not None
        done, _ = self._decay(batch)
        return float(initial * self.lr_decay_factor ** (done / self.epoch_length))

    def _steps(self, batch: int, initial: float) -> float:
        assert self.lr_decay_factor is not None
        passed = sum(update <= batch // self.epoch_length for update in self.updates)
        return float(initial * self.lr_decay_factor**passed)

    def _function(self, batch: int, initial: float) -> float:
        assert self.lr_schedule_function is not None
        epoch, iteration = divmod(batch, self.epoch_length)
        return self.lr_schedule_function(
            initial_lr=initial,
            epoch=epoch - self.lr_warmup_epochs,
            iter=iteration,
            max_epoch=self.end_epoch - self.lr_warmup_epochs,
            iters_per_epoch=self.epoch_length,
        )


@dataclass(frozen=True)
class _Mode:
    rate: Callable[[LRSchedule, int, float], float]
    """Function of the schedule, the batch after which the rate last changed, and the initial rate."""
    required: tuple[tuple[str, ...], ...] = ()
    """Required keys: exactly one key from each tuple."""
    keys: tuple[str, ...] = ()
    """Optional keys of the mode."""


MODES: Mapping[str, _Mode] = {
    "StepLRScheduler": _Mode(
        LRSchedule._steps, (("lr_updates", "step_lr_update_freq"), ("lr_decay_factor",))
    ),
    "PolyLRScheduler": _Mode(LRSchedule._poly),
    "CosineLRScheduler": _Mode(LRSchedule._cosine, keys=("cosine_final_lr_ratio",)),
    "ExponentialLRScheduler": _Mode(LRSchedule._exponential, (("lr_decay_factor",),)),
    "FunctionLRScheduler": _Mode(LRSchedule._function, (("lr_schedule_function",),)),
}


def check_known(name: str | None, known: Iterable[str], key: str) -> None:
    """Raise `UnknownNameError` for `key` unless `name` is None or in `known`."""
    names = list(known)
    if name is not None and name not in names:
        raise UnknownNameError(
            f"'{name}' does not exist{did_you_mean(name, names)} (available: {', '.join(names)})", key
        )


def _interpolate(start: float, end: float, step: int, steps: int) -> float:
    """Interpolate linearly from `start` to `end` over `steps` steps. The result is `end` after the last step."""
    return end if step >= steps > 0 else start + (end - start) * step / max(steps, 1)
