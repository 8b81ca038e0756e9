"""Option: keep an average of the weights over the steps, and validate and save with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from slipstream.config import options
from slipstream.errors import ConfigError, did_you_mean
from slipstream.model import BaseAveragedModel, DecaySchedule, ScheduledEMA, StochasticWeightAverage

__all__ = ["EmaOptions", "check_begin", "read_ema"]

_TYPES = (*DecaySchedule.types, "swa")


@dataclass(frozen=True)
class EmaOptions:
    """`ema=dict(...)`: how the weights are averaged."""

    decay: float | None = None
    """The largest share of the old average that an update keeps; None is 0.9999."""
    type: str = "exp"
    """How the decay grows: `constant`, `threshold` or `exp`; or `swa`, the plain mean of all weights."""
    beta: float | None = None
    """Of `exp`: how early it comes near its largest decay; None is 15."""
    interval: int = 1
    """Average every that many updates of the weights, beginning with the first."""
    begin_iter: int = 0
    """The iteration from which on to average."""
    begin_epoch: int = 0
    """The epoch from which on to average; at most one of the two."""

    def __post_init__(self) -> None:
        if self.type not in _TYPES:
            hint = did_you_mean(self.type, _TYPES)
            raise ConfigError(f"must be one of {_TYPES}, not {self.type!r}{hint}", "type")
        if self.type != "swa":
            DecaySchedule(decay_type=self.type, **self._given())
        elif given := self._given():
            raise ConfigError("'swa' is a plain mean and needs none: leave it out", next(iter(given)))
        if self.interval < 1:
            raise ConfigError(f"must be at least 1, not {self.interval}", "interval")
        check_begin(self.begin_iter, self.begin_epoch)

    def _given(self) -> dict[str, float]:
        words = {"decay": self.decay, "beta": self.beta}
        return {word: value for word, value in words.items() if value is not None}

    def average(self, model: nn.Module) -> BaseAveragedModel:
        """Return an average of this kind of the model's weights, which begins with a copy of them."""
        if self.type == "swa":
            return StochasticWeightAverage(model, self.interval, update_buffers=True, every_batch=False)
        decay = DecaySchedule.decay if self.decay is None else self.decay
        return ScheduledEMA(model, decay, self.type, self.beta, self.interval)


def read_ema(value: Any) -> EmaOptions | None:
    """Read `ema` as a configuration has it: True, False, None or a dict.

    Raises:
        ConfigError: anything else, an unknown option, or a wrong value.
    """
    if value is None or value is False:
        return None
    if isinstance(value, Mapping) and "momentum" in value:
        raise ConfigError("is EMAHook's word for 1 - decay: give decay alone", "ema.momentum")
    return options(EmaOptions, {} if value is True else value, "ema")


def check_begin(begin_iter: int, begin_epoch: int) -> None:
    """Raise a ConfigError unless at most one of the two is given, and neither is negative."""
    if begin_iter and begin_epoch:
        raise ConfigError("give begin_iter or begin_epoch, not both", "begin_epoch")
    for name, value in {"begin_iter": begin_iter, "begin_epoch": begin_epoch}.items():
        if value < 0:
            raise ConfigError(f"must not be negative, not {value}", name)
