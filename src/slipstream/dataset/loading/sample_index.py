"""Randomness of a sample as a pure function of (seed, epoch, index)."""

from __future__ import annotations

import numpy as np

__all__ = ["SampleIndex", "sample_rng"]


class SampleIndex(int):
    """A sample's index that also carries the run's seed and the epoch; any data set takes it as an int."""

    seed: int
    epoch: int

    def __new__(cls, index: int, seed: int, epoch: int) -> SampleIndex:
        """Make an int that also knows the run's seed and the epoch."""
        self = super().__new__(cls, index)
        self.seed = seed
        self.epoch = epoch
        return self

    def __reduce__(self) -> tuple[type[SampleIndex], tuple[int, int, int]]:
        return SampleIndex, (int(self), self.seed, self.epoch)


def sample_rng(index: int) -> np.random.Generator:
    """Return the generator of one sample; a plain int counts as seed 0, epoch 0."""
    seed, epoch = getattr(index, "seed", 0), getattr(index, "epoch", 0)
    return np.random.default_rng((seed, epoch, int(index)))
