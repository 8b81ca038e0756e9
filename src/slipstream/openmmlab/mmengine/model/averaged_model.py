"""Averaged models."""

from slipstream.model import (
    BaseAveragedModel,
    ExponentialMovingAverage,
    MomentumAnnealingEMA,
    StochasticWeightAverage,
)

__all__ = ["BaseAveragedModel", "ExponentialMovingAverage", "MomentumAnnealingEMA", "StochasticWeightAverage"]
