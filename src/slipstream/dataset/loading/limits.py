"""Limit the number of batches in each epoch of a loader."""

from __future__ import annotations

from copy import copy
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from slipstream.dataset.loading.loader import build_dataloader, copied_loader, limited_stream
from slipstream.dataset.loading.samplers import EpochBatchSampler
from slipstream.errors import ConfigError

__all__ = ["limit_batches"]


def limit_batches(
    loader: DataLoader[Any], count: int, option: str, name: str, repeat: bool = False
) -> DataLoader[Any]:
    """Return a copy of `loader` with at most `count` batches per epoch.

    Args:
        loader: a loader returned by `build_dataloader`; it is not changed.
        count: maximum number of batches per epoch.
        option: name of the option in error messages.
        name: name of the loader in error messages.
        repeat: whether every epoch uses the batches of the first epoch, with the same augmentation.

    Raises:
        ConfigError: `repeat` is set for an iterable dataset, or the loader cannot be limited.
    """
    batches, dataset = loader.batch_sampler, _dataset(loader)
    if isinstance(batches, EpochBatchSampler):
        # Unlike a new sampler, a copy keeps the initial generator states if the loader has already been used.
        limited = copy(batches)
        limited.limit = count if batches.limit is None else min(count, batches.limit)
        limited.repeats = repeat
        return copied_loader(loader, batch_sampler=limited)
    if batches is None and isinstance(dataset, list):
        return build_dataloader(dataset[:count], 0, name, training=False)
    if isinstance(dataset, IterableDataset):
        if repeat:
            raise ConfigError(
                f"does not support the loader in {name}, whose dataset is iterable and may yield different samples in "
                f"each epoch; pass a list of batches as {name}",
                option,
            )
        if (stream := limited_stream(loader, count)) is not None:
            return stream
    raise ConfigError(
        f"does not support the loader in {name}, of class {type(loader).__name__}: with a map-style dataset, the "
        "loader must have a batch sampler, and with an iterable dataset, it must not be a subclass of DataLoader; "
        "limit the size of the dataset instead",
        option,
    )


def _dataset(loader: DataLoader[Any]) -> Any:
    return loader.dataset
