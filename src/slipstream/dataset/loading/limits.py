"""Limit the number of batches in each epoch of a loader."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from slipstream.dataset.loading.loader import build_dataloader
from slipstream.dataset.loading.samplers import EpochBatchSampler
from slipstream.errors import ConfigError

__all__ = ["limit_batches"]


def limit_batches(
    loader: DataLoader[Any], count: int, option: str, name: str, repeat: bool = False
) -> DataLoader[Any]:
    """Return `loader` with at most `count` batches per epoch.

    Args:
        loader: a loader returned by `build_dataloader`; it may be modified in place.
        count: the number of batches.
        option: name of the option in error messages.
        name: name of the loader in error messages.
        repeat: whether every epoch uses the batches of the first epoch, with the same augmentation.

    Raises:
        ConfigError: the loader has neither a batch sampler nor a list of batches.
    """
    batches, dataset = loader.batch_sampler, _dataset(loader)
    if isinstance(batches, EpochBatchSampler):
        batches.limit = count if batches.limit is None else min(count, batches.limit)
        batches.repeats = repeat
        return loader
    if batches is None and isinstance(dataset, list):
        return build_dataloader(dataset[:count], 0, name, training=False)
    raise ConfigError(
        f"does not support the loader in {name}, which has no batch sampler (its dataset is iterable); limit the "
        "dataset itself",
        option,
    )


def _dataset(loader: DataLoader[Any]) -> Any:
    return loader.dataset
