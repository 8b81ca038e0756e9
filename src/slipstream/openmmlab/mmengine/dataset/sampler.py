"""Samplers."""

from slipstream.dataset import DefaultSampler, InfiniteSampler

__all__ = ["DefaultSampler", "InfiniteSampler"]
