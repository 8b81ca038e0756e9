"""SuperGradients' data loaders, which yield (images, targets) when a script iterates over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from slipstream.dataset import apply_device_transforms
from slipstream.errors import ConfigError
from slipstream.training import dataloaders
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

__all__ = ["TupleLoader", "get"]

_TORCHVISION: Mapping[str, tuple[str, ...]] = {
    "Normalize": ("mean", "std"),
    "RandomCrop": ("size", "padding"),
    "RandomHorizontalFlip": ("p",),
    "ToTensor": (),
}
"""torchvision's transforms that have an equivalent of the same name in Slipstream, and their arguments."""
_UNSUPPORTED = {"padding_mode": "constant", "fill": 0, "pad_if_needed": False}
"""torchvision's arguments that have no equivalent, and their default values."""


class TupleLoader(DataLoader[Any]):
    """A data loader whose batches are pairs of images and targets.

    All transforms are applied to the images, including those that Slipstream otherwise applies on the device, and class
    ids are int64. Batches of a user's own dataset are not changed. Training does not use this iterator: the
    Trainer rebuilds the loader, and applies color jitter and normalization on the device.
    """

    def __iter__(self) -> Any:
        return map(_pair, super().__iter__())


def get(
    name: str | None = None,
    dataset_params: Mapping[str, Any] | None = None,
    dataloader_params: Mapping[str, Any] | None = None,
    dataset: Dataset[Any] | None = None,
    dataloader: DataLoader[Any] | None = None,
) -> DataLoader[Any]:
    """Return a loader that yields (images, targets); for arguments and errors, see `slipstream.training.dataloaders`.

    `dataset_params.transforms` may contain torchvision's `ToTensor`, `Normalize`, `RandomCrop` and
    `RandomHorizontalFlip`.
    """
    if dataloader is not None:
        return dataloader
    params = dict(dataset_params or {})
    if isinstance(transforms := params.get("transforms"), list | tuple):
        params["transforms"] = [_own_transform(entry, index) for index, entry in enumerate(transforms)]
    data, options = dataloaders.arguments(name, params, dataloader_params, dataset)
    loader: Any = TupleLoader(data, **options)
    loader.dataloader_params = options
    return loader  # type: ignore[no-any-return]


def _pair(batch: Any) -> Any:
    if not isinstance(batch, Mapping) or not {"inputs", "targets"} <= batch.keys():
        return batch
    images, targets = apply_device_transforms(batch)["inputs"], batch["targets"]
    is_ids = isinstance(targets, Tensor) and not targets.is_floating_point()
    return images, targets.long() if is_ids else targets


def _own_transform(transform: Any, index: int) -> Any:
    """Return Slipstream's equivalent of a torchvision transform; other entries are returned unchanged."""
    kind = type(transform)
    if not kind.__module__.startswith("torchvision.transforms"):
        return transform
    changed = [key for key, default in _UNSUPPORTED.items() if getattr(transform, key, default) != default]
    if kind.__name__ not in _TORCHVISION or changed:
        raise ConfigError(
            f"torchvision's {kind.__name__}{' with ' if changed else ''}{', '.join(changed)} is not supported; use "
            f"{', '.join(_TORCHVISION)}, the name of one of Slipstream's transforms, or a function of an image (uint8, "
            "3 x H x W) and a NumPy generator",
            f"dataset_params.transforms[{index}]",
        )
    arguments = {key: getattr(transform, key) for key in _TORCHVISION[kind.__name__]}
    return {kind.__name__: {key: value for key, value in arguments.items() if value is not None}}


def __getattr__(name: str) -> Callable[..., DataLoader[Any]]:
    """Return `get` with `name` as its first argument, for calls such as `cifar10_train(dataset_params={...})`."""
    getattr(dataloaders, name)  # raises an AttributeError with a hint if there is no such loader
    return partial(get, name)
