"""The number of samples in each batch of a pass over a loader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from slipstream.dataset.loading.loader import batch_size, last_batch_size, length

__all__ = ["BatchSizes", "count_samples"]


class BatchSizes:
    """The number of this rank's samples in each batch of a pass over a loader.

    For a `BatchSampler` of torch, the sizes follow from the length of the dataset. For other batch samplers and for
    iterable datasets, the samples are counted in the batch.

    Args:
        loader: a loader of `build_dataloader`.
        start: number of the first batch of the pass, from 0.
        used: number of samples that are left out at the beginning of this batch.
    """

    def __init__(self, loader: DataLoader[Any], start: int = 0, used: int = 0) -> None:
        self._size = batch_size(loader)
        self._last_size = last_batch_size(loader)
        self._last = (length(loader) or 0) - 1
        self._start, self._used = start, used

    def at(self, number: int, batch: Any) -> int:
        """Return the number of samples in batch `number` (from 0); 1 if it can neither be computed nor counted."""
        if self._last_size is None or self._size is None:
            found = count_samples(batch)
            return self._size or 1 if found is None else min(found, self._size or found)
        size = self._last_size if number == self._last else self._size
        return size - self._used if number == self._start else size


def count_samples(batch: Any) -> int | None:
    """Return the number of samples in a collated batch, or None if its structure does not show it.

    If the batch or one of its fields is a tensor, the number of samples is the tensor's first dimension. Otherwise, it
    is the length of the first field that is a list or a tuple.
    """
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else None
    fields = list(batch.values()) if isinstance(batch, Mapping) else batch
    if not isinstance(fields, list | tuple):
        return None
    tensors = (len(field) for field in fields if isinstance(field, Tensor) and field.ndim)
    lists = (len(field) for field in fields if isinstance(field, list | tuple))
    return next(tensors, next(lists, None))
