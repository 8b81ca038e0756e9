"""SuperGradients' data loaders, which yield (images, targets) when a script iterates over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from slipstream.dataset import apply_device_transforms
from slipstream.training import dataloaders


class TupleLoader(DataLoader[Any]):
    """A data loader whose batches are pairs of images and targets.

    All transforms are applied to the images, including those that Slipstream otherwise applies on the device, and class
    ids are int64. Batches of a user's own dataset are not changed. Training does not use this iterator, and applies
    color jitter and normalization on the device.
    """

    run_class = DataLoader
    """The class of this loader in a run."""

    def __iter__(self) -> Any:
        return map(_pair, super().__iter__())


def get(*arguments: Any, **options: Any) -> DataLoader[Any]:
    """Return a loader that yields (images, targets); see `slipstream.training.dataloaders.get`."""
    return dataloaders.get(*arguments, **options, kind=TupleLoader)


def _pair(batch: Any) -> Any:
    if not isinstance(batch, Mapping) or not {"inputs", "targets"} <= batch.keys():
        return batch
    images, targets = apply_device_transforms(batch)["inputs"], batch["targets"]
    is_ids = isinstance(targets, Tensor) and not targets.is_floating_point()
    return images, targets.long() if is_ids else targets


def __getattr__(name: str) -> Callable[..., DataLoader[Any]]:
    """Return `get` with `name` as its first argument, for calls such as `cifar10_train(dataset_params={...})`."""
    getattr(dataloaders, name)  # raises an AttributeError with a hint if there is no such loader
    return partial(get, name)
