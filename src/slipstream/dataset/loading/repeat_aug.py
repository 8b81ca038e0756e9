"""Sampler for repeated augmentation: each sample occurs several times, with a different augmentation each time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from slipstream.dist import get_dist_info
from slipstream.errors import DataError
from slipstream.registry import DATA_SAMPLERS

__all__ = ["RepeatAugSampler", "RepeatedIndex"]


class RepeatedIndex(int):
    """Index of a sample, with its repetition number in the epoch."""

    seed_offset: int
    """Offset added to the run's seed for the augmentation of this repetition."""

    def __new__(cls, index: int, repeat: int) -> RepeatedIndex:
        """Create the index."""
        self = super().__new__(cls, index)
        self.seed_offset = repeat << 32  # larger than typical seeds
        return self


@DATA_SAMPLERS.register_module()
class RepeatAugSampler(Sampler[int]):
    """SuperGradients' sampler for repeated augmentation (arXiv 1902.05509).

    In the shuffled dataset, each sample is repeated `num_repeats` times in a row. Rank r of R reads items r, r + R and
    so on, so the repetitions of a sample are distributed across the ranks. An epoch has about as many samples as the
    dataset. The augmentation of a sample depends on (seed, epoch, index, repetition).

    Args:
        dataset: any object with a length.
        shuffle: whether to reshuffle the samples in each epoch.
        num_repeats: number of repetitions, at least 1; it may be fractional.
        selected_round: the total number of samples is rounded down to a multiple of this number; 0 disables rounding.
        selected_ratio: the total is divided by this number to obtain the number of samples per rank; 0 means the number
            of ranks.
        seed: seed for shuffling; it must be the same on every rank.

    Raises:
        DataError: an epoch has no samples.
    """

    def __init__(
        self,
        dataset: Sized,
        shuffle: bool = True,
        num_repeats: float = 3,
        selected_round: int = 256,
        selected_ratio: int = 0,
        seed: int | None = None,
    ) -> None:
        self.rank, self.world_size = get_dist_info()
        self.size, self.shuffle, self.seed = len(dataset), shuffle, seed or 0
        self.num_repeats = max(num_repeats, 1)
        divisor = selected_ratio or self.world_size
        if selected_round:
            self.num_samples = self.size // selected_round * selected_round // divisor
        else:
            self.num_samples = math.ceil(self.size / divisor)
        if self.num_samples == 0:
            remedy = "set selected_round=0" if selected_round else "the dataset must contain samples"
            raise DataError(
                f"RepeatAugSampler: each rank would receive no sample of the {self.size} samples in the dataset (with "
                f"selected_round={selected_round} and {divisor} shards); {remedy}"
            )
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.size, generator=generator) if self.shuffle else torch.arange(self.size)
        total = math.ceil(self.size * self.num_repeats)
        for index in range(self.num_samples):
            position = (self.rank + index * self.world_size) % total
            sample = int(position // self.num_repeats)
            first = math.ceil(sample * self.num_repeats)
            yield RepeatedIndex(int(order[sample]), position - first)

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that determines the order of the next iteration."""
        self.epoch = epoch
