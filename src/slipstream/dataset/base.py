"""What every segmentation data set shares: loading, augmenting, packing into tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import Dataset

from slipstream.dataset.sample_index import sample_rng
from slipstream.errors import DataError
from slipstream.registry import TRANSFORMS

__all__ = ["Sample", "SegmentationDataset", "Transform", "default_palette"]

# {"image": uint8 (H, W, 3) RGB, "mask": uint8 (H, W)}
Sample: TypeAlias = dict[str, np.ndarray[Any, np.dtype[np.uint8]]]
Transform: TypeAlias = Callable[[Sample, np.random.Generator], Sample]


class SegmentationDataset(Dataset[dict[str, torch.Tensor]], ABC):
    """Base of the data sets of images with one class id a pixel.

    A subclass defines `load`, `__len__` and `metainfo`, a dict with `classes` (tuple of str), `palette`
    (one [r, g, b] a class) and `ignore_index` (the id that counts as no class, or None).

    `dataset[i]` is `{"inputs": uint8 (3, H, W) RGB, "targets": uint8 (H, W)}`. Augmentation depends only
    on the (seed, epoch, index) of a `SampleIndex`, never on workers, processes or the order of access.

    Args:
        transforms: functions of a sample and a generator, which return a new sample and leave the
            arrays they were given as they are; or dicts that TRANSFORMS builds.
        cache_in_memory: keep each loaded pair (before the transforms) in memory: for data that is small,
            or slow to make. Every worker process keeps its own copy, for as long as it lives.
    """

    metainfo: dict[str, Any]

    def __init__(
        self, transforms: Sequence[Transform | Mapping[str, Any]] = (), cache_in_memory: bool = False
    ) -> None:
        self.transforms: list[Transform] = [
            TRANSFORMS.build(t) if isinstance(t, Mapping) else t for t in transforms
        ]
        self._cache: dict[int, Sample] | None = {} if cache_in_memory else None

    @abstractmethod
    def load(self, index: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return image `index` as uint8 (H, W, 3) RGB and its mask as uint8 (H, W)."""

    @abstractmethod
    def __len__(self) -> int: ...

    def get_cat_ids(self, index: int) -> list[int]:
        """Return the class ids that occur in the mask of sample `index`, sorted, without the ignored id."""
        _, mask = self.load(index)
        return [i for i in np.unique(mask).tolist() if i != self.metainfo["ignore_index"]]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"{type(self).__name__} has samples 0 to {len(self) - 1}, not {int(index)}")
        sample, rng = self._loaded(int(index)), sample_rng(index)
        for transform in self.transforms:
            sample = transform(sample, rng)
        return self._packed(sample, int(index))

    def _loaded(self, index: int) -> Sample:
        if self._cache is not None and index in self._cache:
            return dict(self._cache[index])
        image, mask = self.load(index)
        if self._cache is not None:
            # A transform that wrote into the cache would change every later epoch.
            image.flags.writeable = mask.flags.writeable = False
            self._cache[index] = {"image": image, "mask": mask}
        return {"image": image, "mask": mask}

    def _packed(self, sample: Sample, index: int) -> dict[str, torch.Tensor]:
        image, mask = sample["image"], sample["mask"]
        if not image.dtype == mask.dtype == np.uint8 or mask.ndim != 2 or image.shape != (*mask.shape, 3):
            raise DataError(
                f"sample {index} of {type(self).__name__}: image {image.dtype} {image.shape} and mask "
                f"{mask.dtype} {mask.shape} must be uint8 (H, W, 3) and uint8 (H, W); "
                "check what load() and the last transform return"
            )
        return {
            "inputs": torch.from_numpy(np.array(image.transpose(2, 0, 1), order="C")),
            "targets": torch.from_numpy(np.array(mask, order="C")),
        }


def default_palette(count: int) -> list[list[int]]:
    """Return `count` distinct colours (at most 256), the colour map of the PASCAL VOC development kit.

    Bits 0, 3, 6 of the class id are the highest bits of red, bits 1, 4, 7 those of green and bits 2, 5
    those of blue.
    """
    shifts = [(bit, 7 - bit // 3) for bit in range(8)]
    return [
        [sum((i >> bit & 1) << place for bit, place in shifts if bit % 3 == channel) for channel in range(3)]
        for i in range(count)
    ]
