"""Recompute the indices of the samples in a batch without loading the samples."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from slipstream.dataset.loading.samplers import EpochBatchSampler, InfiniteSampler, uses_own_generator
from slipstream.dataset.loading.samples import SeededDataset

__all__ = ["EpochOrder", "batch_indices"]


def batch_indices(
    loader: DataLoader[Any], epoch: int, batch_index: int, order: EpochOrder | None = None
) -> list[int] | None:
    """Return the indices of this rank's samples in a batch, or None if the order cannot be recomputed.

    If `skip_errors` has replaced a sample of the batch, the index of the replacement is returned.

    For `DefaultSampler`, `InfiniteSampler` and torch's samplers in a `BatchSampler`, the order depends only on the seed
    and the epoch. Other samplers and iterable datasets may depend on state that a second iteration would change.

    Args:
        loader: a loader returned by `build_dataloader`. An iteration in progress is not affected.
        epoch: index of the epoch (pass over the data) that contains the batch, starting at 0; always 0 for an endless
            sampler.
        batch_index: index of the batch in the epoch, starting at 0.
        order: an `EpochOrder` to pass to each call with this loader, so that consecutive calls for batches of the same
            epoch do not draw the order again. By default, every call draws it.
    """
    batches = loader.batch_sampler
    if not isinstance(batches, EpochBatchSampler) or not uses_own_generator(batches):
        return None
    epoch = 0 if batches.repeats else epoch
    indices = _sampled_indices(batches, epoch, batch_index, order or EpochOrder())
    if indices is not None and isinstance(loader.dataset, SeededDataset):
        # An endless sampler passes over the dataset several times; each pass counts as an epoch.
        passes = batch_index * batches.batch_sampler.batch_size // batches.samples
        return loader.dataset.resolve_replacements(epoch + passes, indices)
    return indices


def _sampled_indices(
    batches: EpochBatchSampler, epoch: int, batch_index: int, order: EpochOrder
) -> list[int] | None:
    """Return the indices that the sampler yields for a batch."""
    inner, sampler = batches.batch_sampler, batches.sampler
    if isinstance(sampler, InfiniteSampler):
        first = batch_index * inner.batch_size
        copied = copy.copy(sampler)
        copied.set_epoch(epoch)
        return copied.indices(first, first + inner.batch_size)
    # Copy the sampler and its generator, because an iteration in progress uses the originals.
    sampler = copy.copy(sampler)
    if isinstance(getattr(sampler, "generator", None), torch.Generator):
        sampler.generator = torch.Generator()
    copied_batches = EpochBatchSampler(
        BatchSampler(sampler, inner.batch_size, inner.drop_last),
        batches.seed,
        batches.samples,
        use_sample_index=False,
        limit=batches.limit,
    )
    copied_batches.set_epoch(epoch)
    return order.batch(copied_batches, batch_index)


class EpochOrder:
    """The sample order of one epoch, which is drawn only once if batches are requested in ascending order."""

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._next = 0
        self._rest: Iterator[list[int]] = iter(())

    def batch(self, batches: EpochBatchSampler, batch_index: int) -> list[int] | None:
        """Return batch `batch_index` of the sampler's epoch, or None if the epoch has fewer batches."""
        if batches.epoch != self._epoch or batch_index < self._next:
            self._epoch, self._next, self._rest = batches.epoch, 0, iter(batches)
        indices = next(islice(self._rest, batch_index - self._next, None), None)
        self._next = batch_index + 1
        return indices
