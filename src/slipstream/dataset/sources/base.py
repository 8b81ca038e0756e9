"""Base classes of datasets, which load, cache and transform samples and convert them to tensors."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from colorsys import hsv_to_rgb
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from slipstream.dataset.loading.generators import sample_rng
from slipstream.dataset.sources.cache import DecodeCache
from slipstream.dataset.transforms.crop import Sample
from slipstream.dataset.transforms.image_transforms import ImageTransforms, read_transforms
from slipstream.dataset.transforms.libraries import call_image_transform, is_uint8
from slipstream.dataset.transforms.pipeline import Transform, apply_transforms, check_transforms
from slipstream.errors import ConfigError, DataError
from slipstream.files import download
from slipstream.registry import TRANSFORMS

__all__ = [
    "ImageDataset", "Sample", "SegmentationDataset", "Transform", "check_index", "class_metainfo",
    "default_palette", "download_data", "file_version", "segmentation_metainfo",
]  # fmt: skip


def file_version(*paths: Path) -> str:
    """Return the sizes and modification times of files."""
    try:
        return "-".join(f"{s.st_size}-{s.st_mtime_ns}" for s in (path.stat() for path in paths))
    except OSError as error:
        raise DataError(f"cannot read '{error.filename}': {error.strerror}") from error


def check_index(dataset: Any, index: int) -> None:
    """Raise an IndexError if the dataset has no sample `index`."""
    if not 0 <= index < len(dataset):
        raise IndexError(f"{type(dataset).__name__} has {len(dataset)} samples, and no sample {int(index)}")


class ImageDataset(Dataset[dict[str, Any]], ABC):
    """Base class for datasets of images with a class id or other values. A subclass defines `load` and `__len__`.

    Augmentation depends only on the (seed, epoch, index) of a `SampleIndex`. If the transforms contain `ToTensor`, a
    sample also contains `"device_params"`, the parameters of the device transforms (see
    `slipstream.dataset.transforms.device_transforms`). `all_transforms` lists the transforms, including these.

    Args:
        transforms: transforms of the image in `inputs`; see `ImageNetDataset`.
    """

    targets: torch.Tensor

    def __init__(self, transforms: ImageTransforms) -> None:
        self.all_transforms = list(transforms)
        self.transforms, self._device_params = read_transforms(transforms)

    @abstractmethod
    def load(self, index: int) -> dict[str, Any]:
        """Return sample `index`, in which images are uint8 (3, H, W) arrays."""

    @abstractmethod
    def __len__(self) -> int: ...

    def get_cat_ids(self, index: int) -> list[int]:
        """Return a list that contains the class id of sample `index`."""
        return [int(self.targets[index])]

    def __getitem__(self, index: int) -> dict[str, Any]:
        check_index(self, index)
        sample = self.load(int(index))
        if self.transforms:
            rng, image = sample_rng(index), sample.get("inputs")
            if not isinstance(image, np.ndarray):
                raise DataError("transforms require an image in the field 'inputs'")
            for transform in self.transforms:
                image = call_image_transform(transform, image, rng)
            sample["inputs"] = image
            if self._device_params is not None and not is_uint8(image):
                raise DataError(
                    "ToTensor requires uint8 images, but a transform before it normalizes them; remove one"
                )
        for key, value in sample.items():
            if isinstance(value, np.ndarray):
                sample[key] = torch.from_numpy(np.array(value, order="C"))
        return sample if self._device_params is None else {**sample, "device_params": self._device_params}


class SegmentationDataset(Dataset[dict[str, torch.Tensor]], ABC):
    """Base class for datasets of images with one class id per pixel.

    A subclass defines `load`, `__len__` and `metainfo`, a dict with `classes` (tuple of str), `palette`
    (one [r, g, b] per class) and `ignore_index` (id of pixels without a class, or None).

    A sample is `{"inputs": uint8 (3, H, W) RGB, "targets": uint8 (H, W)}`. If the transforms include color jitter or
    normalization, it also contains `"device_params"`, the device transform parameters, which the data preprocessor
    applies (see `apply_transforms`). Augmentation depends only on the (seed, epoch, index) of a `SampleIndex`, not on
    workers, processes or the access order.

    Args:
        transforms: functions that take a sample, and optionally a generator, and return a new sample without modifying
            their input arrays; transforms of Albumentations and torchvision.transforms.v2; or dicts from which
            `TRANSFORMS` builds transforms.
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
        raise ConfigError(f"requires that {type(self).__name__} defines cache_key(index)", "cache")

    def sample_key(self, files: Sequence[Any], version: str, table: bytes = b"") -> tuple[str, str]:
        """Return a cache key for a sample that is read from `files` and whose mask values are mapped by `table`."""
        # `oriented` invalidates cached files from versions that did not apply the EXIF orientation.
        meaning = f"oriented {len(self.metainfo['classes'])} {self.metainfo['ignore_index']} ".encode()
        digest = hashlib.blake2b(meaning + table, digest_size=8).hexdigest()
        dataset_class = (
            f"{type(self).__module__}.{type(self).__qualname__}"  # a subclass may decode differently
        )
        return "\n".join([dataset_class, *map(str, files)]), f"{version}-{digest}"

    def check_mask(self, mask: NDArray[np.uint8], values: NDArray[np.uint8], name: Any) -> None:
        """Raise a DataError if a pixel of the mask has neither a class id nor the ignored id.

        Args:
            mask: the mask.
            values: the pixel values in the file, for the message.
            name: the file.
        """
        count, ignored = len(self.metainfo["classes"]), self.metainfo["ignore_index"]
        if mask.max() < count + (ignored == count):
            return
        invalid = (mask >= count) & (mask != (-1 if ignored is None else ignored))
        if invalid.any():
            found, pixels = np.unique(values[invalid], return_counts=True)
            listed = ", ".join(f"{i} ({n} pixels)" for i, n in zip(found, pixels, strict=True))
            raise DataError(
                f"the mask '{name}' has invalid label ids: {listed}. There are {count} classes, and ignore_index is "
                f"{ignored}; correct the file, or change classes, label_map or ignore_index"
            )

    def check_sizes(
        self, image: NDArray[np.uint8], image_name: Any, mask: NDArray[np.uint8], name: Any
    ) -> None:
        """Raise a DataError if an image and its mask differ in size."""
        if image.shape[:2] != mask.shape:
            raise DataError(
                f"'{image_name}' is {image.shape[1]} x {image.shape[0]} pixels, but its mask '{name}' is "
                f"{mask.shape[1]} x {mask.shape[0]} (after applying the EXIF orientation)"
            )

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        check_index(self, index)
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
# Chosen so that any two of the first colors are easy to tell apart.
_SATURATIONS, _VALUES = (0.75, 0.55, 0.95), (0.95, 0.7, 0.85)


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


def class_metainfo(classes: Sequence[str]) -> dict[str, Any]:
    """Return the `metainfo` of a classification dataset."""
    palette = default_palette(min(len(classes), 256))
    return {"classes": tuple(classes), "palette": palette, "ignore_index": None}


def segmentation_metainfo(
    classes: Sequence[str], palette: Sequence[Sequence[int]] | None, ignore_index: int | None
) -> dict[str, Any]:
    """Return the `metainfo` of a segmentation dataset.

    Raises:
        ConfigError: `palette` or `ignore_index` does not match the classes.
    """
    if isinstance(classes, str) or not 0 < len(classes) <= 256:
        raise ConfigError(f"must be a list of 1 to 256 names, not {classes!r}", "classes")
    if ignore_index is not None and not 0 <= ignore_index <= 255:
        raise ConfigError(f"must be from 0 to 255 or None, not {ignore_index}", "ignore_index")
    if palette is None:
        palette = default_palette(len(classes))
    if len(palette) != len(classes):
        raise ConfigError(f"must have {len(classes)} colors, one per class, not {len(palette)}", "palette")
    colors = [list(color) for color in palette]
    return {"classes": tuple(classes), "palette": colors, "ignore_index": ignore_index}


def download_data(url: str, target: Path, md5: str, remedy: str) -> None:
    """Download a file to `target` and verify its published MD5 checksum.

    Raises:
        DataError: the download fails, or the checksum differs. The message ends with `remedy`.
    """
    try:
        download(url, target)
    except OSError as error:
        raise DataError(f"cannot download {url}: {error}. {remedy}") from error
    with target.open("rb") as file:
        actual = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if actual != md5:
        raise DataError(f"the file from {url} is damaged (MD5 {actual}, expected {md5})")
