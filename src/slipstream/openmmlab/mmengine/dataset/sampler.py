"""`DefaultSampler` and `InfiniteSampler`, re-exported under MMEngine's module path."""

from slipstream.dataset import DefaultSampler, InfiniteSampler

__all__ = ["DefaultSampler", "InfiniteSampler"]
