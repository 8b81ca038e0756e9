"""Sample indices with a seed and an epoch, and the random generator of a sample."""

from __future__ import annotations

import numpy as np

__all__ = ["SampleIndex", "sample_rng"]


class SampleIndex(int):
    """Sample index that includes the run's seed and the epoch. It is an `int`, so every dataset accepts it."""

    seed: int
    epoch: int

    def __new__(cls, index: int, seed: int, epoch: int) -> SampleIndex:
        """Create the index."""
        self = super().__new__(cls, index)
        self.seed = seed
        self.epoch = epoch
        return self

    def __reduce__(self) -> tuple[type[SampleIndex], tuple[int, int, int]]:
        return SampleIndex, (int(self), self.seed, self.epoch)


def sample_rng(index: int) -> np.random.Generator:
    """Return the random generator of one sample. For a plain int, the seed and the epoch are 0."""
    seed, epoch = getattr(index, "seed", 0), getattr(index, "epoch", 0)
    return np.random.default_rng((seed, epoch, int(index)))
