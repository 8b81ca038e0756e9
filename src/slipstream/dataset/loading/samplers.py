"""Samplers whose order depends only on the seed and the epoch."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping, Sized
from itertools import islice
from operator import itemgetter
from typing import Any, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from slipstream.dataset.loading.generators import isolate_random_state
from slipstream.dataset.loading.sample_index import SampleIndex
from slipstream.dataset.loading.sampler_state import SamplerState
from slipstream.dist import get_dist_info
from slipstream.errors import DataError
from slipstream.registry import DATA_SAMPLERS

__all__ = ["DefaultSampler", "EpochBatchSampler", "InfiniteSampler", "uses_own_generator"]


def _order(size: int, shuffle: bool, seed: int) -> list[int]:
    if not shuffle:
        return list(range(size))
    return cast("list[int]", torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist())


@DATA_SAMPLERS.register_module()
class DefaultSampler(Sampler[int]):
    """Sampler for one rank, which yields items rank, rank + world_size, ... of the shuffled or original order.

    Args:
        dataset: any object with a length.
        shuffle: whether to reshuffle the samples in each epoch.
        seed: seed for shuffling; it must be the same on every rank.
        round_up: whether to repeat the first samples so that all ranks get the same number of samples. The Runner's
            validation and test loaders set this to False, so that no sample is counted twice.
    """

    def __init__(
        self, dataset: Sized, shuffle: bool = True, seed: int | None = None, round_up: bool = True
    ) -> None:
        self.rank, self.world_size = get_dist_info()
        self.dataset, self.size = dataset, len(dataset)
        self.shuffle, self.seed, self.round_up = shuffle, seed or 0, round_up
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        indices = _order(self.size, self.shuffle, self.seed + self.epoch)
        if self.round_up:
            total = len(self) * self.world_size
            indices = (indices * math.ceil(total / max(self.size, 1)))[:total]
        return iter(indices[self.rank :: self.world_size])

    def __len__(self) -> int:
        if self.round_up:
            return math.ceil(self.size / self.world_size)
        return math.ceil((self.size - self.rank) / self.world_size)

    @property
    def num_samples(self) -> int:
        """Number of this rank's samples in an epoch."""
        return len(self)

    @property
    def total_size(self) -> int:
        """Total number of samples in an epoch across all ranks."""
        return len(self) * self.world_size if self.round_up else self.size

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that determines the order of the next iteration."""
        self.epoch = epoch


@DATA_SAMPLERS.register_module()
class InfiniteSampler(Sampler[int]):
    """Endless sampler for iteration-based loops; with `shuffle`, each pass over the dataset has a different order."""

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int | None = None) -> None:
        self.rank, self.world_size = get_dist_info()
        self.size = len(dataset)
        self.shuffle, self.seed = shuffle, seed or 0
        self.epoch = 0

    def _stream(self) -> Iterator[int]:
        epoch = self.epoch
        while self.size:
            yield from _order(self.size, self.shuffle, self.seed + epoch)
            epoch += 1

    def __iter__(self) -> Iterator[int]:
        return islice(self._stream(), self.rank, None, self.world_size)

    def __len__(self) -> int:
        return math.ceil(self.size / self.world_size)

    def indices(self, first: int, end: int) -> list[int]:
        """Return this rank's indices at positions `first` to `end - 1`, without drawing the preceding indices."""
        orders: dict[int, list[int]] = {}
        indices = []
        for position in range(
            self.rank + first * self.world_size, self.rank + end * self.world_size, self.world_size
        ):
            pass_index, offset = divmod(position, self.size)
            if pass_index not in orders:
                orders[pass_index] = _order(self.size, self.shuffle, self.seed + self.epoch + pass_index)
            indices.append(orders[pass_index][offset])
        return indices

    def set_epoch(self, epoch: int) -> None:
        """Set the pass over the dataset at which the next iteration starts."""
        self.epoch = epoch


# If their `generator` is set, these samplers draw all random numbers from it.
_SAMPLERS_WITH_OWN_GENERATOR = (
    DefaultSampler,
    InfiniteSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

_NUM_COMPARED_INDICES = 10_000
"""Number of indices that `differing_state` compares in two draws of the same epoch."""


class EpochBatchSampler(Sampler[list[int]]):
    """Batch sampler wrapper that can start at any batch of any epoch, and yields `SampleIndex` objects with the epoch.

    If an iteration starts in the middle of an epoch, the skipped indices are drawn, but their samples are not loaded.
    A sampler's `generator` is seeded from the seed and the epoch. If a sampler draws from the global generators,
    they are seeded in the same way and restored afterwards. The states of other generators in a sampler and in its
    nested objects are set for each epoch (see `SamplerState`).

    Args:
        batch_sampler: iterable of lists of indices.
        seed: seed of the run.
        samples: number of this rank's samples in one pass over the dataset.
        use_sample_index: whether to yield `SampleIndex` objects; False for datasets whose samples do not depend on the
            epoch.
        limit: maximum number of batches in an epoch; None for no limit.
    """

    def __init__(
        self,
        batch_sampler: Any,
        seed: int,
        samples: int,
        use_sample_index: bool = True,
        limit: int | None = None,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.sampler: Any = getattr(batch_sampler, "sampler", None)
        self.seed = seed
        self.samples = max(samples, 1)
        self.use_sample_index = use_sample_index
        self.limit = limit
        self.repeats = False
        """Whether every epoch is the same as epoch 0."""
        self._state = SamplerState([self.sampler, batch_sampler])
        self.epoch = 0
        self.start = 0
        self.skip = 0
        self._sizes: list[tuple[int, int]] = []

    def set_epoch(self, epoch: int, start: int = 0, skip: int = 0) -> None:
        """Start the next iteration at batch `start` of this epoch, and skip the first `skip` samples of that batch."""
        epoch = 0 if self.repeats else epoch
        self.epoch, self.start, self.skip = epoch, start, skip
        for sampler in (self.sampler, self.batch_sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def generator_states(self) -> dict[str, Any]:
        """Return the initial states of the sampler's generators, to store in checkpoints.

        A new process may create a generator with a different state, for example if the generator is not seeded.
        """
        return {} if uses_own_generator(self) else self._state.initial_states()

    def restore_generators(self, states: Mapping[str, Any]) -> None:
        """Restore the states that `generator_states` returned in another process.

        Raises:
            ValueError: a state is not valid for its generator.
        """
        self._state.restore_initial_states(states)

    def changed_state(self) -> list[str]:
        """Return the names of the sampler's attributes that an iteration has changed and that cannot be restored."""
        return [] if uses_own_generator(self) else self._state.changed_attributes()

    def differing_state(self, epoch: int) -> list[str]:
        """Return the names of attributes that determine an epoch's order but cannot be set for the epoch.

        The list is empty if two draws of the epoch have the same order. If they differ and the cause is not found, the
        list contains the name of the sampler's class. The attributes of the sampler are restored after the draws. Only
        the first `_NUM_COMPARED_INDICES` samples are drawn. If a sampler stores an iterator, nothing is drawn.
        """
        if uses_own_generator(self):
            return []
        if names := self._state.iterators():
            return names
        samplers = [sampler for sampler in (self.batch_sampler, self.sampler) if sampler is not None]
        if any(isinstance(sampler, Iterator) for sampler in samplers):
            return [type(samplers[-1]).__name__]
        before = self.epoch, self._state.save_attributes()
        try:
            if self._first_indices(epoch) == self._first_indices(epoch):
                return []
            unknown = self._state.changed_attributes() or self._state.new_generators()
            return unknown or [type(samplers[-1]).__name__]
        finally:
            self.epoch = before[0]
            self._state.restore_attributes(before[1])

    def _first_indices(self, epoch: int) -> list[str]:
        """Return the batches with the first `_NUM_COMPARED_INDICES` indices of an epoch, as strings."""
        self.set_epoch(epoch)
        batches, count = [], 0
        for batch in islice(self._batches(), self.limit):
            batches.append(repr(batch))
            count += len(batch)
            if count >= _NUM_COMPARED_INDICES:
                break
        return batches

    @property
    def endless(self) -> bool:
        """Whether an iteration never ends."""
        return isinstance(self.sampler, InfiniteSampler) and self.limit is None

    def __iter__(self) -> Iterator[list[int]]:
        start, self.start = self.start, 0
        skip, self.skip = self.skip, 0
        first, drawn = self.epoch, 0
        self._sizes = []
        for index, batch in enumerate(islice(self._batches(), self.limit)):
            # For an endless sampler, each pass over the dataset counts as an epoch.
            epoch = first + drawn // self.samples
            drawn += len(batch)
            if index == start:
                batch = batch[skip:] if skip else batch
            if index >= start:
                if not self._sizes or self._sizes[-1][1] != len(batch):
                    self._sizes.append((index, len(batch)))
                yield (
                    [self._sample_index(sample, epoch) for sample in batch]
                    if self.use_sample_index
                    else batch
                )

    def batch_size_at(self, batch_index: int) -> int | None:
        """Return the number of samples in a batch of the latest iteration, or None if no batch has been drawn."""
        position = bisect.bisect_right(self._sizes, batch_index, key=itemgetter(0))
        return self._sizes[position - 1][1] if position else None

    def _batches(self) -> Iterator[list[int]]:
        for sampler in (self.sampler, self.batch_sampler):
            if getattr(sampler, "generator", 0) is None:
                sampler.generator = torch.Generator()
            if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
                generator.manual_seed(self.seed + self.epoch)
        if uses_own_generator(self):
            return iter(self.batch_sampler)
        self._state.set_epoch(self.epoch)
        return isolate_random_state(self.batch_sampler, (self.seed, self.epoch))

    def _sample_index(self, index: Any, epoch: int) -> Any:
        if not hasattr(index, "__index__"):
            return index
        return SampleIndex(index, self.seed + getattr(index, "seed_offset", 0), epoch)

    def __len__(self) -> int:
        if self.limit is None:
            return len(self.batch_sampler)
        endless = isinstance(self.sampler, InfiniteSampler)
        return self.limit if endless else min(self.limit, len(self.batch_sampler))


def uses_own_generator(batches: EpochBatchSampler) -> bool:
    """Return whether the order depends only on the seed and the epoch, and not on the global generators."""
    return (
        type(batches.batch_sampler) is BatchSampler and type(batches.sampler) in _SAMPLERS_WITH_OWN_GENERATOR
    )


def check_not_empty(dataset: Any, name: str) -> None:
    """Raise a DataError if `dataset` has a length and is empty."""
    if isinstance(dataset, Sized) and len(dataset) == 0:
        raise DataError(
            f"{name}: the dataset {type(dataset).__name__} has no samples; check its folder and split"
        )
