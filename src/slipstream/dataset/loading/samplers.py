"""Samplers whose order depends only on the seed and the epoch."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sized
from itertools import chain, islice, zip_longest
from typing import Any, cast
from zlib import crc32

import torch
from torch.nn import Module
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from slipstream.dataset.loading.generators import SampleBatch, SampleIndex, isolate_random_state
from slipstream.dist import all_gather_object, get_dist_info, get_rank, get_world_size
from slipstream.errors import DataError
from slipstream.registry import DATA_SAMPLERS


def _order(size: int, shuffle: bool, seed: int) -> list[int]:
    if not shuffle:
        return list(range(size))
    return cast("list[int]", torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist())


class _EpochSampler(Sampler[int]):
    """Base class of samplers for one rank, whose order depends on the seed and the epoch."""

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int | None = None) -> None:
        self.rank, self.world_size = get_dist_info()
        self.dataset = dataset
        self.shuffle, self.seed, self.epoch = shuffle, seed or 0, 0

    @property
    def size(self) -> int:
        """Number of samples in the dataset, which a hook may change."""
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that determines the order of the next iteration."""
        self.epoch = epoch


@DATA_SAMPLERS.register_module()
class DefaultSampler(_EpochSampler):
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
        super().__init__(dataset, shuffle, seed)
        self.round_up = round_up

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


@DATA_SAMPLERS.register_module()
class InfiniteSampler(_EpochSampler):
    """Endless sampler for iteration-based loops; with `shuffle`, each pass over the dataset has a different order."""

    def _stream(self) -> Iterator[int]:
        epoch = self.epoch
        while self.size:
            yield from _order(self.size, self.shuffle, self.seed + epoch)
            epoch += 1

    def __iter__(self) -> Iterator[int]:
        return islice(self._stream(), self.rank, None, self.world_size)

    def __len__(self) -> int:
        return math.ceil(self.size / self.world_size)


class RepeatedIndex(int):
    """Index of a sample, with its repetition number in the epoch.

    `seed_offset` is added to the run's seed for the augmentation of this repetition.
    """

    seed_offset: int

    def __new__(cls, index: int, repeat: int) -> RepeatedIndex:
        """Create the index."""
        self = super().__new__(cls, index)
        self.seed_offset = repeat << 32  # larger than typical seeds
        return self


@DATA_SAMPLERS.register_module()
class RepeatAugSampler(_EpochSampler):
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
        super().__init__(dataset, shuffle, seed)
        self.num_repeats = max(num_repeats, 1)
        divisor = selected_ratio or self.world_size
        if selected_round:
            self.num_samples = self.size // selected_round * selected_round // divisor
        else:
            self.num_samples = math.ceil(self.size / divisor)
        if self.num_samples == 0:
            raise DataError(
                f"RepeatAugSampler: an epoch of {self.size} samples is empty; set selected_round=0"
            )

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
_MAX_RECORDED_BATCHES = 1024
# The attribute of a sampler with a state: copies from the beginning of the first and of the latest epoch.
_BEGINNINGS = "_slipstream_beginnings"


class EpochBatchSampler(Sampler[list[int]]):
    """Batch sampler wrapper that can start at any batch of any epoch, and yields each batch as a `SampleBatch`.

    If an iteration starts in the middle of an epoch, the skipped indices are drawn, but their samples are not loaded.
    A sampler's `generator` is seeded from the seed and the epoch. The global generators are seeded in the same way
    while another sampler draws from them, and restored afterwards.

    Any other state must belong to the sampler: the order either depends on the epoch that `set_epoch` receives, or
    on the state that `state_dict` returns and `load_state_dict` restores, which checkpoints contain. A sampler without
    these methods continues from one epoch to the next. When a run resumes, the completed epochs are drawn from it once
    more, which gives the same order if the sampler seeds its generators.

    The epoch after `set_epoch` is drawn from the user's sampler, once. Other iterations, such as those of hooks, draw
    from a copy of a sampler with a state, and a new run with the same sampler starts from its initial state.

    Args:
        batch_sampler: iterable of lists of indices.
        seed: seed of the run.
        samples: this rank's number of samples in one pass over the dataset, if the sampler has no length.
        use_sample_index: whether to yield `SampleBatch` objects, with indices of type `SampleIndex`; False for
            datasets whose samples do not depend on the epoch.
        limit: maximum number of batches in an epoch; None for no limit.
        shard: sampler for this rank that replaces the sampler of `batch_sampler`, a `BatchSampler`; None if
            `batch_sampler` yields the batches of this rank.
    """

    def __init__(
        self,
        batch_sampler: Any,
        seed: int,
        samples: int,
        use_sample_index: bool = True,
        limit: int | None = None,
        shard: Any = None,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.shard = shard
        self.sampler: Any = getattr(batch_sampler, "sampler", None) if shard is None else shard
        self.seed = seed
        self._samples = samples
        self.use_sample_index = use_sample_index
        self.limit = limit
        # Whether every epoch consists of the batches of epoch 0.
        self.repeats = False
        self.epoch = self.start = self.skip = 0
        self._fixed: list[list[int]] | None = None
        self._begins = False
        # The number of earlier passes in this epoch, if the loader's class may start several passes in one epoch.
        self.passes: int | None = None
        self._offset = 0
        # None before the first epoch, and -1 if the states must be loaded before the next epoch.
        self._next_epoch: int | None = None
        self._states: dict[int, list[Any]] = {}
        # The sample indices of the batches drawn last, by epoch (0 if every epoch is epoch 0) and index.
        self.recent: dict[tuple[int, int], list[int]] = {}

    def set_epoch(self, epoch: int, start: int = 0, skip: int = 0) -> None:
        """Start the next iteration at batch `start` of this epoch, and skip the first `skip` samples of that batch."""
        self.epoch, self.start, self.skip = 0 if self.repeats else epoch, start, skip
        self._begins, self._offset = True, 0
        for sampler in _parts(self._sharded(self.batch_sampler)):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the states that samplers with `state_dict` had at the beginning of the latest epochs."""
        return {"states": dict(self._states)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self._states = dict(state["states"])
        self._next_epoch = -1

    @property
    def samples(self) -> int:
        """This rank's number of samples in one pass over the dataset, at least 1."""
        return max(len(self.sampler) if isinstance(self.sampler, Sized) else self._samples, 1)

    @property
    def endless(self) -> bool:
        """Whether an iteration never ends."""
        return isinstance(self.sampler, InfiniteSampler) and self.limit is None

    @property
    def is_padded(self) -> bool:
        """Whether ranks may draw samples that other ranks draw as well."""
        unpadded = isinstance(self.sampler, DefaultSampler) and not self.sampler.round_up
        return get_world_size() > 1 and not (unpadded and type(self.batch_sampler) is BatchSampler)

    def draw_without_repeats(self) -> None:
        """Draw the batches of the following iterations, without samples that other ranks or earlier batches contain.

        Distributed samplers repeat samples so that all ranks get the same number of samples. Every rank must call this
        method.
        """
        batches = list(islice(self._draw(self.epoch, self._copy()), self.limit))
        drawn = all_gather_object([_key(index) for batch in batches for index in batch])
        seen: set[Any] = set()
        kept: list[bool] = []
        for indices in zip_longest(*drawn, fillvalue=_MISSING):
            for rank, index in enumerate(indices):
                if rank == get_rank() and index is not _MISSING:
                    kept.append(index not in seen)
                seen.add(index)
        keeps = iter(kept)
        real = ([index for index in batch if next(keeps)] for batch in batches)
        self._fixed = [batch for batch in real if batch]

    def __iter__(self) -> Iterator[list[int]]:
        start, self.start = self.start, 0
        skip, self.skip = self.skip, 0
        # Each pass within an epoch draws the order of a later epoch.
        passes, offset, drawn = self.passes or 0, self._offset if self.passes else 0, 0
        if self.passes is not None:
            self.passes += 1
        first = self.epoch + passes
        batches = islice(self._draw(first, self.batch_sampler), self.limit) if passes else self._batches()
        for index, batch in enumerate(batches, offset):
            # For an endless sampler, each pass over the dataset counts as an epoch.
            epoch = first + drawn // self.samples
            drawn += len(batch)
            self._offset = index + 1
            if index < start:
                continue
            if index == start and skip:
                batch = batch[skip:]
            self._record(self.epoch, index, batch)
            yield self._sample_batch(batch, epoch) if self.use_sample_index else batch

    def __len__(self) -> int:
        if self._fixed is not None:
            return len(self._fixed)
        if self.limit is not None and isinstance(self.sampler, InfiniteSampler):
            return self.limit
        count = len(self._sharded(self.batch_sampler))
        return count if self.limit is None else min(self.limit, count)

    def _record(self, epoch: int, index: int, batch: list[int]) -> None:
        self.recent[epoch, index] = batch
        if len(self.recent) > _MAX_RECORDED_BATCHES:
            del self.recent[next(iter(self.recent))]

    def _batches(self) -> Iterator[list[int]]:
        """Return an iterator over the batches of the current epoch, up to the limit."""
        if self.repeats and self._fixed is None:
            self._fixed = list(islice(self._draw(0, self.batch_sampler), self.limit))
        if self._fixed is not None:
            return iter(self._fixed)
        if not self._begins or not self._stateful():
            return islice(self._draw(self.epoch, self._copy()), self.limit)
        self._begins = False
        self._restore_epoch()
        return self._draw_to_end(self.epoch)

    def _draw_to_end(self, epoch: int) -> Iterator[list[int]]:
        """Yield the batches up to the limit, and draw the others, so that the user's sampler completes the epoch."""
        batches = self._draw(epoch, self.batch_sampler)
        yield from islice(batches, self.limit)
        if self.limit is not None and isinstance(self.batch_sampler, Sized):
            deque(islice(batches, len(self.batch_sampler)), maxlen=0)

    def _sharded(self, batches: Any) -> Any:
        """Return the batch sampler of this rank. A hook may have changed the batch size of `batches`."""
        if self.shard is None:
            return batches
        return BatchSampler(self.shard, batches.batch_size, batches.drop_last)

    def _draw(self, epoch: int, batches: Any) -> Iterator[list[int]]:
        """Seed the generators and iterate over the user's batch sampler, or over a copy of it."""
        batches = self._sharded(batches)
        for sampler in _parts(batches):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            if getattr(sampler, "generator", 0) is None:
                sampler.generator = torch.Generator()
            if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
                generator.manual_seed(self.seed + epoch)
        if type(batches) is BatchSampler and type(batches.sampler) in _SAMPLERS_WITH_OWN_GENERATOR:
            return iter(batches)
        return isolate_random_state(batches, (self.seed, epoch))

    def _stateful(self) -> list[Any]:
        """Return the samplers whose order may depend on earlier epochs."""
        known = (BatchSampler, *_SAMPLERS_WITH_OWN_GENERATOR)
        parts = [part for part in _parts(self.batch_sampler) if type(part) not in known]
        return [part for part in parts if hasattr(part, "__dict__") and not hasattr(part, "set_epoch")]

    def _copy(self) -> Any:
        """Return a copy of the batch sampler, from the beginning of the current epoch if that epoch has begun."""
        if not (parts := self._stateful()):
            return self.batch_sampler
        saved = None if self._next_epoch is None else vars(parts[0]).get(_BEGINNINGS, {}).get(self.epoch)
        return _copied(self.batch_sampler if saved is None else saved)

    def _restore_epoch(self) -> None:
        """Bring samplers whose order depends on earlier epochs to the beginning of the current epoch."""
        parts = self._stateful()
        saves = [part for part in parts if hasattr(part, "state_dict") and hasattr(part, "load_state_dict")]
        earlier: dict[int, Any] = vars(parts[0]).pop(_BEGINNINGS, {})  # neither saved nor copied
        if self.epoch != self._next_epoch:
            begin = max(self._next_epoch or 0, 0)
            if saved := [epoch for epoch in self._states if epoch <= self.epoch]:
                begin = max(saved)
                for part, state in zip(saves, self._states[begin], strict=True):
                    part.load_state_dict(copy.deepcopy(state))
            elif saved := [epoch for epoch in earlier if epoch <= self.epoch and self._next_epoch is None]:
                begin = max(saved)  # an earlier run has drawn from this sampler
                _restore(self.batch_sampler, _copied(earlier[begin]))
            for epoch in range(begin, self.epoch):
                deque(self._draw_to_end(epoch), maxlen=0)
        self._next_epoch = self.epoch + 1
        if saves:
            self._states = {self.epoch: [copy.deepcopy(part.state_dict()) for part in saves]}
        first = min([*earlier, self.epoch])
        latest = _copied(self.batch_sampler)
        vars(parts[0])[_BEGINNINGS] = {first: earlier.get(first, latest), self.epoch: latest}

    def _sample_batch(self, batch: list[Any], epoch: int) -> SampleBatch:
        """Return the indices with the seed and the epoch. Keys that are not integers are unchanged."""
        indices = [
            SampleIndex(index, self.seed + getattr(index, "seed_offset", 0), epoch)
            if hasattr(index, "__index__")
            else index
            for index in batch
        ]
        first = getattr(indices[0], "seed", self.seed) if indices else self.seed
        return SampleBatch(indices, (first << 64) + (epoch << 32) + crc32(repr(indices).encode()), epoch)


_MISSING = object()


def _key(index: Any) -> Any:
    return index if isinstance(index, Hashable) else repr(index)


def _parts(batches: Any) -> list[Any]:
    return [part for part in (getattr(batches, "sampler", None), batches) if part is not None]


def _copied(batches: Any) -> Any:
    """Return a deep copy of a batch sampler that shares datasets and models, or itself if it cannot be copied."""
    values = chain.from_iterable(vars(part).items() for part in _parts(batches) if hasattr(part, "__dict__"))
    shared = {
        id(v): v
        for name, v in values
        if name in ("dataset", "data_source") or isinstance(v, Dataset | Module)
    }
    try:
        return copy.deepcopy(batches, shared)
    except Exception:  # for example, an open file, a generator, or a tensor with a history
        return batches


def _restore(batches: Any, saved: Any) -> None:
    """Restore the state of a batch sampler and its sampler in place, except the options of the batches."""
    for part, old in zip(_parts(batches), _parts(saved), strict=True):
        state = vars(old).items() if hasattr(part, "__dict__") else ()
        vars(part).update({k: v for k, v in state if k not in ("sampler", "batch_size", "drop_last")})


def check_not_empty(dataset: Any, name: str) -> None:
    """Raise a DataError if `dataset` has a length and is empty."""
    if isinstance(dataset, Sized) and len(dataset) == 0:
        raise DataError(f"{name}: the dataset {type(dataset).__name__} has no samples; check its folder")
