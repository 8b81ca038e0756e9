"""SuperGradients' `IDecayFunction`: user-defined EMA decay schedules."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from slipstream.errors import ConfigError
from slipstream.hooks import EMAHook
from slipstream.model import DecaySchedule, ScheduledEMA
from slipstream.training.params import TrainingParams

__all__ = ["EMA_DECAY_FUNCTIONS", "IDecayFunction", "split_decay"]


class IDecayFunction:
    """Base class for decay schedules. Subclasses accept the other keys of `ema_params` as keyword arguments."""

    def __call__(self, decay: float, step: int, total_steps: int) -> float:
        """Return the decay after `step` of `total_steps` batches.

        Args:
            decay: the value of `ema_params.decay`.
            step: number of completed batches, starting at 1.
            total_steps: number of batches in the training run.
        """
        raise NotImplementedError(f"{type(self).__name__} must define __call__(decay, step, total_steps)")


EMA_DECAY_FUNCTIONS: dict[str, type[IDecayFunction]] = {}
"""User-defined decay schedules by name, for example `EMA_DECAY_FUNCTIONS["linear"] = LinearDecay`."""


def split_decay(params: TrainingParams) -> tuple[TrainingParams, EMAHook | None]:
    """Return the parameters with `ema` disabled, and an EMA hook with the user-defined schedule that they select.

    If they do not select such a schedule, return `params` unchanged and None.

    Raises:
        ConfigError: if the schedule does not accept the keys of `ema_params`.
    """
    options: dict[str, Any] = dict(params.ema_params)
    name = options.pop("decay_type", None)
    if not params.ema or name not in EMA_DECAY_FUNCTIONS:
        return params, None
    decay = options.pop("decay", DecaySchedule.decay)
    try:
        function = EMA_DECAY_FUNCTIONS[name](**options)
    except TypeError as error:
        raise ConfigError(f"{name}: {error}", "training_params.ema_params") from None
    average = partial(ScheduledEMA, decay=decay, decay_type="constant", count="batches", function=function)
    return replace(params, ema=False, ema_params={}), EMAHook(average)
