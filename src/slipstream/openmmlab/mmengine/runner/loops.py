"""Loops, re-exported under MMEngine's module path."""

from slipstream.runner import BaseLoop, EpochBasedTrainLoop, IterBasedTrainLoop, TestLoop, ValLoop

__all__ = ["BaseLoop", "EpochBasedTrainLoop", "IterBasedTrainLoop", "TestLoop", "ValLoop"]
