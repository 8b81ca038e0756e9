"""Averaged models, re-exported under MMEngine's module path."""

from slipstream.model import (
    BaseAveragedModel,
    ExponentialMovingAverage,
    MomentumAnnealingEMA,
    StochasticWeightAverage,
)

__all__ = ["BaseAveragedModel", "ExponentialMovingAverage", "MomentumAnnealingEMA", "StochasticWeightAverage"]
