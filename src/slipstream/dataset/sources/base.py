"""Base class for segmentation datasets: it loads, caches and transforms samples, and converts them to tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from colorsys import hsv_to_rgb
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from slipstream.dataset.loading.generators import sample_rng
from slipstream.dataset.sources.cache import DecodeCache
from slipstream.dataset.transforms.crop import Sample
from slipstream.dataset.transforms.pipeline import Transform, apply_transforms, check_transforms
from slipstream.errors import ConfigError
from slipstream.registry import TRANSFORMS

__all__ = ["Sample", "SegmentationDataset", "Transform", "default_palette", "segmentation_metainfo"]


class SegmentationDataset(Dataset[dict[str, torch.Tensor]], ABC):
    """Base class for datasets of images with one class id per pixel.

    A subclass defines `load`, `__len__` and `metainfo`, a dict with `classes` (tuple of str), `palette`
    (one [r, g, b] per class) and `ignore_index` (id of pixels without a class, or None).

    A sample is `{"inputs": uint8 (3, H, W) RGB, "targets": uint8 (H, W)}`. If the transforms include color jitter or
    normalization, it also contains `"device_params"`, the device transform parameters, which the data preprocessor
    applies (see `apply_transforms`). Augmentation depends only on the (seed, epoch, index) of a `SampleIndex`, not on
    workers, processes or the access order.

    Args:
        transforms: functions that take a sample and a generator, and return a new sample without modifying their input
            arrays; or dicts from which `TRANSFORMS` builds such functions.
        cache_in_memory: keep each loaded image and mask (before the transforms) in memory. Use this option for small
            datasets, or for samples that are slow to create. Every worker process keeps a separate copy.
        cache: folder in which decoded images and masks are stored for later epochs and for all processes (see
            `DecodeCache`).
    """

    metainfo: dict[str, Any]

    def __init__(
        self,
        transforms: Sequence[Transform | Mapping[str, Any]] = (),
        cache_in_memory: bool = False,
        cache: str | Path | None = None,
    ) -> None:
        self.transforms: list[Transform] = [
            TRANSFORMS.build(t) if isinstance(t, Mapping) else t for t in transforms
        ]
        check_transforms(self.transforms)
        self.cache = DecodeCache(cache) if cache else None  # `cache=` on the command line sets it to ''
        self._cache: dict[int, Sample] | None = {} if cache_in_memory else None

    @abstractmethod
    def load(self, index: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return image `index` as uint8 (H, W, 3) RGB and its mask as uint8 (H, W)."""

    @abstractmethod
    def __len__(self) -> int: ...

    def get_cat_ids(self, index: int) -> list[int]:
        """Return the sorted class ids in the mask of sample `index`, excluding `ignore_index`."""
        _, mask = self.load(index)
        return [i for i in np.unique(mask).tolist() if i != self.metainfo["ignore_index"]]

    def cache_key(self, index: int) -> tuple[str, str]:
        """Return the sample's name and a version that changes whenever the result of `load(index)` changes."""
        raise ConfigError(
            f"{type(self).__name__} does not define cache_key(index), so its samples cannot be cached on disk; define "
            "this method or remove this option",
            "cache",
        )

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(
                f"sample index {int(index)} is out of range for {type(self).__name__}, which has "
                f"{len(self)} sample{'s' * (len(self) != 1)}"
            )
        name = f"sample {int(index)} of {type(self).__name__}"
        return apply_transforms(self.transforms, self._loaded(int(index)), sample_rng(index), name)

    def _loaded(self, index: int) -> Sample:
        if self._cache is not None and index in self._cache:
            return dict(self._cache[index])
        if self.cache is None:
            image, mask = self.load(index)
        else:
            image, mask = self.cache.get(self.cache_key(index), partial(self.load, index))
            if self._cache is not None:  # mapped files stay open, and the number of open files is limited
                image, mask = image.copy(), mask.copy()
        if self._cache is not None:
            # Prevent transforms from modifying the cached arrays.
            image.flags.writeable = mask.flags.writeable = False
            self._cache[index] = {"image": image, "mask": mask}
        return {"image": image, "mask": mask}


_GOLDEN_RATIO = 0.618034
_FIRST_HUE = 0.55
_SATURATIONS, _VALUES = (0.75, 0.55, 0.95), (0.95, 0.7, 0.85)
"""Chosen so that any two of the first colors are easy to tell apart."""


def default_palette(count: int) -> list[list[int]]:
    """Return `count` colors (at most 256) that are easy to tell apart; none of them is black.

    The hue of each color is the previous hue plus the golden ratio, so successive hues are far apart. Three levels
    of saturation and of brightness distinguish colors with similar hues.
    """
    hues = [(_FIRST_HUE + _GOLDEN_RATIO * index) % 1 for index in range(count)]
    return [
        [round(255 * part) for part in hsv_to_rgb(hue, _SATURATIONS[index % 3], _VALUES[index // 3 % 3])]
        for index, hue in enumerate(hues)
    ]


def segmentation_metainfo(
    classes: Sequence[str], palette: Sequence[Sequence[int]] | None, ignore_index: int | None
) -> dict[str, Any]:
    """Return the `metainfo` of a segmentation dataset.

    Raises:
        ConfigError: `palette` or `ignore_index` does not match the classes.
    """
    if isinstance(classes, str) or not 0 < len(classes) <= 256:
        raise ConfigError(f"classes must be a list of 1 to 256 names, got {classes!r}")
    if ignore_index is not None and not 0 <= ignore_index <= 255:
        raise ConfigError(
            f"ignore_index must be from 0 to 255 (masks are uint8), or None, got {ignore_index}"
        )
    if palette is None:
        palette = default_palette(len(classes))
    if len(palette) != len(classes):
        raise ConfigError(
            f"palette must have one color per class: expected {len(classes)} colors, got {len(palette)}"
        )
    return {
        "classes": tuple(classes),
        "palette": [list(color) for color in palette],
        "ignore_index": ignore_index,
    }
