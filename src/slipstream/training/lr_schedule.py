"""The learning rate of every iteration in SuperGradients' modes, in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.optim.scheduler.checks import check_int

__all__ = ["MODES", "WARMUPS", "LRSchedule", "check_known"]

WARMUPS = {"LinearEpochLRWarmup": "lr_warmup_epochs", "LinearBatchLRWarmup": "lr_warmup_steps"}
"""The warm-ups, and the key that says how long each is."""


@dataclass(frozen=True)
class LRSchedule:
    """The learning rate at iteration t, from the initial one and t alone, as SuperGradients 3.7 has it.

    It moves the rate after an optimizer step, by the number of the batch that ended the step:
    b = A floor(t / A) - 1 with A = `batch_accumulate`, and no more in the epochs of the cool-down. With L batches an
    epoch, W epochs of warm-up, C of cool-down, the initial rate i, s = b - W L and S = (max_epochs - W - C) L:

    - `PolyLRScheduler`: i (1 - s / S)^0.9
    - `CosineLRScheduler`: i (r + (1 - r) (1 + cos(pi s / (S + 1))) / 2) with r = `cosine_final_lr_ratio`; s and S
      are less by the steps of a warm-up by batches
    - `ExponentialLRScheduler`: i `lr_decay_factor`^(s / L)
    - `StepLRScheduler`: i `lr_decay_factor`^n, n of `lr_updates` not being above the last finished epoch (counted
      from 0); with `step_lr_update_freq` f these are ceil(f k), k = 1, 2, ..., from the warm-up to the cool-down
    - `FunctionLRScheduler`: `lr_schedule_function(initial_lr=i, epoch=b // L - W, iter=b % L, max_epoch=S / L,
      iters_per_epoch=L)`

    `LinearEpochLRWarmup` climbs by epochs from `warmup_initial_lr`, by default i / (W + 1), to i in epoch W;
    `LinearBatchLRWarmup` by batches (by default from 0), the last of min(`lr_warmup_steps`, L) having i. A rate that
    is 0 at first stays 0. In one thing the original is not followed: there a cosine after a warm-up by batches rises
    in the cool-down.

    Raises:
        ConfigError, UnknownNameError: a key is wrong, is missing, or contradicts another.
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
                f"belongs to warmup_mode 'LinearBatchLRWarmup', not {self.warmup_mode!r}", "lr_warmup_steps"
            )
        for either in MODES[self.lr_mode].needs if self.lr_mode else ():
            given = [key for key in either if getattr(self, key)]
            if not given:
                raise ConfigError(f"needed by lr_mode '{self.lr_mode}'", " or ".join(either))
            if len(given) > 1:
                raise ConfigError(f"says the same as {given[0]}: give one of them", given[1])

    def rate(self, step: int, initial: float, start: float | None = None) -> float:
        """Return the rate at iteration `step`; `start`: where the warm-up starts, if not where all do."""
        start = self.warmup_initial_lr if start is None else start
        if initial == 0:
            return 0.0
        if step < self.climbing_steps:
            return _between(start or 0.0, initial, step, self.climbing_steps - 1)
        batch = self._last_update(step)
        first = max(self.lr_warmup_epochs * self.epoch_length, self.climbing_steps - 1)
        if self.lr_mode is not None and batch >= first:
            return MODES[self.lr_mode].rate(self, batch, initial)
        if self.climbing_epochs:
            start = initial / (self.climbing_epochs + 1) if start is None else start
            return _between(start, initial, step // self.epoch_length, self.climbing_epochs)
        return initial

    @property
    def climbing_epochs(self) -> int:
        """Epochs of a warm-up by epochs."""
        return self.lr_warmup_epochs if self.warmup_mode == "LinearEpochLRWarmup" else 0

    @property
    def climbing_steps(self) -> int:
        """Batches of a warm-up by batches."""
        return min(self.lr_warmup_steps, self.epoch_length)

    @property
    def climbing(self) -> int:
        """Iterations of the warm-up."""
        return max(self.climbing_epochs * self.epoch_length, self.climbing_steps)

    @property
    def only_climbs(self) -> bool:
        """Whether a warm-up and the cool-down leave no iteration of the run to `lr_mode`."""
        between = self.end_epoch * self.epoch_length - self.climbing
        return self.climbing > 0 and between <= 0

    @property
    def end_epoch(self) -> int:
        """The first epoch of the cool-down."""
        return self.max_epochs - self.lr_cooldown_epochs

    @cached_property
    def updates(self) -> list[Any]:
        """After which epochs a `StepLRScheduler` moves the rate."""
        if not self.step_lr_update_freq:
            return self.lr_updates
        epochs = (math.ceil(self.step_lr_update_freq * k) for k in range(1, self.end_epoch))
        return [epoch for epoch in epochs if self.lr_warmup_epochs <= epoch < self.end_epoch]

    def _last_update(self, step: int) -> int:
        """Return the number of the batch after which the rate was moved last; below 0 for none."""
        if self.lr_mode == "StepLRScheduler":
            return step // self.epoch_length * self.epoch_length - 1
        step = min(step, self.end_epoch * self.epoch_length)
        return step // self.batch_accumulate * self.batch_accumulate - 1

    def _decay(self, batch: int, skip: int = 0) -> tuple[int, int]:
        """Return how many batches of the decay are done at `batch`, and how many it has."""
        total = (self.end_epoch - self.lr_warmup_epochs) * self.epoch_length
        return batch - self.lr_warmup_epochs * self.epoch_length - skip, total - skip

    def _poly(self, batch: int, initial: float) -> float:
        done, total = self._decay(batch)
        return float(initial * (1 - done / total) ** 0.9)

    def _cosine(self, batch: int, initial: float) -> float:
        done, total = self._decay(batch, skip=self.lr_warmup_steps)
        if done <= 0:
            return initial
        share = (1 + math.cos(math.pi * done / (total + 1))) / 2
        return initial * (self.cosine_final_lr_ratio + (1 - self.cosine_final_lr_ratio) * share)

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
    """From the batch after which the rate was moved last, and the initial rate."""
    needs: tuple[tuple[str, ...], ...] = ()
    """Of each of these, one key."""
    keys: tuple[str, ...] = ()
    """Further keys that belong to it."""


MODES: Mapping[str, _Mode] = {
    "StepLRScheduler": _Mode(
        LRSchedule._steps, (("lr_updates", "step_lr_update_freq"), ("lr_decay_factor",))
    ),
    "PolyLRScheduler": _Mode(LRSchedule._poly),
    "CosineLRScheduler": _Mode(LRSchedule._cosine, keys=("cosine_final_lr_ratio",)),
    "ExponentialLRScheduler": _Mode(LRSchedule._exponential, (("lr_decay_factor",),)),
    "FunctionLRScheduler": _Mode(LRSchedule._function, (("lr_schedule_function",),)),
}


def check_known(word: str | None, known: Iterable[str], key: str) -> None:
    """Raise an `UnknownNameError` at `key`, unless `word` is None or known."""
    names = list(known)
    if word is not None and word not in names:
        raise UnknownNameError(
            f"there is no '{word}'{did_you_mean(word, names)} (there are: {', '.join(names)})", key
        )


def _between(start: float, end: float, step: int, steps: int) -> float:
    """Return where a line from `start` to `end` in `steps` steps is; it does not go on behind its end."""
    return end if step >= steps > 0 else start + (end - start) * step / max(steps, 1)
