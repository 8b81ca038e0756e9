"""Count the samples in each batch of a pass over a loader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from slipstream.dataset.loading.loader import batch_size
from slipstream.dataset.loading.samplers import EpochBatchSampler

__all__ = ["BatchSizes", "count_samples"]


class BatchSizes:
    """The number of this rank's samples in each batch of a pass over a loader.

    If the loader has an `EpochBatchSampler`, the sizes are those of the batches that the sampler has drawn. For
    iterable datasets and for datasets whose items are batches, the samples in each batch are counted.

    Args:
        loader: a loader returned by `build_dataloader`.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._size = batch_size(loader)
        self._batches = loader.batch_sampler if isinstance(loader.batch_sampler, EpochBatchSampler) else None

    def get(self, batch_index: int, batch: Any) -> int:
        """Return the number of samples in the batch with index `batch_index`, counting from 0.

        If this number cannot be determined, return the loader's batch size, or 1 if that is not known either.

        Call this method while the pass over the loader is in progress, because the sizes may differ in the next pass.
        """
        if self._batches is not None and (size := self._batches.batch_size_at(batch_index)) is not None:
            return size
        count = count_samples(batch)
        return self._size or 1 if count is None else min(count, self._size or count)


def count_samples(batch: Any) -> int | None:
    """Return the number of samples in a collated batch, or None if it cannot be determined from the batch structure.

    If the batch or one of its fields is a tensor, the number of samples is the size of the tensor's first dimension.
    Otherwise, it is the length of the first field that is a list or a tuple. In a dict, the `inputs` field takes
    precedence.
    """
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else None
    fields = batch
    if isinstance(batch, Mapping):
        inputs = batch.get("inputs")
        fields = [inputs] if isinstance(inputs, Tensor | list | tuple) else list(batch.values())
    if not isinstance(fields, list | tuple):
        return None
    tensors = (len(field) for field in fields if isinstance(field, Tensor) and field.ndim)
    lists = (len(field) for field in fields if isinstance(field, list | tuple))
    return next(tensors, next(lists, None))
