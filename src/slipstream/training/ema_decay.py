"""SuperGradients' `IDecayFunction`: user-defined EMA decay schedules."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import replace
from inspect import isclass
from typing import Any

from torch import nn

from slipstream.errors import ConfigError
from slipstream.hooks import EMAHook
from slipstream.model import DecaySchedule, ScheduledEMA
from slipstream.registry import FUNCTIONS
from slipstream.training.params import TrainingParams

__all__ = ["EMA_DECAY_FUNCTIONS", "IDecayFunction", "split_decay"]

_PREFIX = "ema_decay_"


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


class _Functions(MutableMapping[str, type[IDecayFunction]]):
    """Maps names for `ema_params.decay_type` to the decay schedules that are registered in `FUNCTIONS`."""

    def __getitem__(self, name: str) -> type[IDecayFunction]:
        found: type[IDecayFunction] = FUNCTIONS.module_dict[_PREFIX + name]
        return found

    def __setitem__(self, name: str, function: Any) -> None:
        if name in DecaySchedule.types:
            raise ConfigError(
                f"'{name}' is a built-in decay schedule; use a different name", "EMA_DECAY_FUNCTIONS"
            )
        if not (isclass(function) and issubclass(function, IDecayFunction)):
            raise ConfigError(
                f"must be a subclass of IDecayFunction, not {function!r}", "EMA_DECAY_FUNCTIONS"
            )
        FUNCTIONS.register_module(name=_PREFIX + name, force=True, module=function)

    def __delitem__(self, name: str) -> None:
        del FUNCTIONS.module_dict[_PREFIX + name]

    def __iter__(self) -> Iterator[str]:
        return (key.removeprefix(_PREFIX) for key in FUNCTIONS.module_dict if key.startswith(_PREFIX))

    def __len__(self) -> int:
        return sum(1 for _ in self)


EMA_DECAY_FUNCTIONS = _Functions()
"""User-defined decay schedules by name, for example `EMA_DECAY_FUNCTIONS["linear"] = LinearDecay`."""


def split_decay(params: TrainingParams) -> tuple[TrainingParams, EMAHook | None]:
    """Return the parameters with `ema` disabled, and an EMA hook with the user-defined schedule that they select.

    If they do not select such a schedule, return `params` unchanged and None.

    Raises:
        ConfigError: if the schedule does not accept the keys of `ema_params`.
    """
    options: dict[str, Any] = dict(params.ema_params)
    name = options.pop("decay_type", None)
    if not params.ema or not isinstance(name, str) or name not in EMA_DECAY_FUNCTIONS:
        return params, None
    decay = options.pop("decay", DecaySchedule.decay)
    try:
        function = EMA_DECAY_FUNCTIONS[name](**options)
    except TypeError as error:
        raise ConfigError(
            f"the schedule '{name}' does not accept these keys: {error}", "training_params.ema_params"
        ) from None

    def average(model: nn.Module) -> ScheduledEMA:
        return ScheduledEMA(model, decay, "constant", count="batches", function=function)

    return replace(params, ema=False, ema_params={}), EMAHook(average)
