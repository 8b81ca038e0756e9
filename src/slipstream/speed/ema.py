"""Speed option: an average of the weights over training steps, for validation and checkpoints.

`EMAHook` or `accelerate` adds a `slipstream.step.average.AveragePart` to the training step to update the average.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from slipstream.config import optional
from slipstream.errors import ConfigError
from slipstream.model import BaseAveragedModel, DecaySchedule, ScheduledEMA, StochasticWeightAverage
from slipstream.typecheck import NonNegativeInt, PositiveInt, check

__all__ = ["EmaOptions", "check_begin", "read_ema"]


@dataclass(frozen=True)
class EmaOptions:
    """Options of `ema=dict(...)`; True selects the defaults."""

    decay: float | None = None
    """Maximum decay (the weight of the old average in an update); None means 0.9999."""
    type: Literal["constant", "threshold", "exp", "swa"] = "exp"
    """Decay schedule: `constant`, `threshold` or `exp`; or `swa` for the mean of the weights over all updates."""
    beta: float | None = None
    """Rate at which the decay of type `exp` approaches its maximum; None means 15. Only for `exp`."""
    interval: PositiveInt = 1
    """Number of weight updates per update of the average. The first weight update also updates the average."""
    begin_iter: NonNegativeInt = 0
    """First iteration whose weights are averaged."""
    begin_epoch: NonNegativeInt = 0
    """First epoch whose weights are averaged; set at most one of `begin_iter` and `begin_epoch`."""
    count: Literal["updates", "batches"] = "updates"
    """Unit of the steps in the decay schedule: `updates`, or `batches` as in SuperGradients."""

    def __post_init__(self) -> None:
        if self.type != "swa":
            DecaySchedule(decay_type=self.type, **self._schedule_kwargs())
        elif kwargs := self._schedule_kwargs():
            raise ConfigError(
                "does not apply to type 'swa', which is a plain mean; remove it", next(iter(kwargs))
            )
        check_begin(self.begin_iter, self.begin_epoch)

    def _schedule_kwargs(self) -> dict[str, float]:
        kwargs = {"decay": self.decay, "beta": self.beta}
        return {key: value for key, value in kwargs.items() if value is not None}

    def average(self, model: nn.Module) -> BaseAveragedModel:
        """Return an average of this type, initialized with the model's weights."""
        if self.type == "swa":
            return StochasticWeightAverage(model, self.interval, update_buffers=True, every_batch=False)
        decay = DecaySchedule.decay if self.decay is None else self.decay
        return ScheduledEMA(model, decay, self.type, self.beta, self.interval, count=self.count)


def read_ema(value: Any) -> EmaOptions | None:
    """Read `ema`: True, False, None or a dict.

    Raises:
        ConfigError: the value has an unsupported type, or an option is unknown or has an invalid value.
    """
    if isinstance(value, Mapping) and "momentum" in value:
        raise ConfigError("is an argument of EMAHook and equals 1 - decay; use decay instead", "ema.momentum")
    return optional(EmaOptions, value, "ema")


def check_begin(begin_iter: int, begin_epoch: int) -> None:
    """Raise a ConfigError if both arguments are set, or if one of them is negative."""
    for name, value in {"begin_iter": begin_iter, "begin_epoch": begin_epoch}.items():
        check(value, NonNegativeInt, name)
    if begin_iter and begin_epoch:
        raise ConfigError("set begin_iter or begin_epoch, not both", "begin_epoch")
