"""Store the class names and transforms of the validation data in a network, for `network.predict`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from slipstream.dataset import SegmentationDataset
from slipstream.zoo.network import Network

__all__ = ["store_processing"]


def store_processing(network: nn.Module, dataset: Any) -> None:
    """Store the class names and transforms of a dataset in a network from the zoo, unless the user has set them.

    Args:
        network: the network. Networks that are not from the zoo are not changed.
        dataset: the validation dataset. Datasets without `metainfo` or transforms, and datasets for a
            different task, are ignored.
    """
    if not isinstance(network, Network):
        return
    while (inner := _inner(dataset)) is not None:
        dataset = inner
    meta = getattr(dataset, "metainfo", None)
    if not isinstance(meta, Mapping):
        return
    is_segmentation = isinstance(dataset, SegmentationDataset)
    transforms = dataset.transforms if is_segmentation else getattr(dataset, "all_transforms", None)
    if transforms is None or is_segmentation is not (network.task == "segmentation"):
        return
    network.set_processing_from_data(meta.get("classes"), transforms, meta.get("palette"))


def _inner(dataset: Any) -> Dataset[Any] | None:
    """Return the dataset inside a wrapper (the first one if there are several), or None if there is none."""
    inner = getattr(dataset, "dataset", None)
    several = getattr(dataset, "datasets", None)
    if inner is None and isinstance(several, list | tuple) and several:
        inner = several[0]
    return inner if isinstance(inner, Dataset) else None
