"""Datasets in WebDataset format: tar files in which consecutive files with the same key form a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from slipstream.dataset.loading.generators import sample_rng
from slipstream.dataset.sources.base import (
    SegmentationDataset,
    Transform,
    default_palette,
    segmentation_metainfo,
)
from slipstream.dataset.sources.decode import MAX_PIXELS, ImageBytes, read_image, read_mask
from slipstream.dataset.sources.shards import MAX_BYTES, TarShards, decode_field, shard_paths
from slipstream.dataset.transforms.image_transforms import (
    ImageTransform,
    Normalize,
    ToTensor,
    read_transforms,
)
from slipstream.errors import ConfigError, DataError
from slipstream.registry import DATASETS

__all__ = ["WebDataset", "WebSegmentationDataset"]

_IMAGE = "jpg;jpeg;png;webp"


@DATASETS.register_module()
class WebDataset(Dataset[dict[str, Any]]):
    """Samples in tar shards written by the `webdataset` library, with random access.

    A sample is a dict with the decoded file of each field (see `decode_field`). With the default fields, it is
    `{"inputs": uint8 (3, H, W) RGB, "targets": int64 ()}`. If the transforms contain `ToTensor`, the sample also
    contains `"device_params"`, the parameters of the device transforms. Samples have the same order as in the
    shards; augmentation depends only on the seed, epoch and index of a `SampleIndex`.

    Args:
        shards: paths of the tar files, which must not be compressed. A path may contain `*`, or ranges such as
            `train-{000000..000146}.tar`.
        fields: the file extensions for each key of a sample, separated by semicolons (such as `jpg;png`); the first
            extension found in a sample is used. Other files are not read. Extensions of pickled files (`pyd`,
            `pkl`, `pickle`, `pth`, `pt`) are rejected.
        transforms: transforms for the image in `inputs`; see `ImageNetDataset`.
        classes: class names for the ids in `targets`, used by the metrics. A class id outside 0..len(classes)-1
            raises an error.
        index: cache folder for the sample positions, which are determined when a shard is first used; by default, a
            folder in the user's cache.
        max_pixels: maximum number of pixels in an image; None for no limit.
        max_bytes: maximum size, in bytes, of a file that is read from a shard.

    Raises:
        DataError: a shard is missing, damaged, incomplete or compressed, or contains a link, or a sample has no file
            for a field; or, when a sample is read, a file is corrupt or too large.
        ConfigError: `shards`, `fields` or the order of the transforms is not valid.
    """

    def __init__(
        self,
        shards: str | Path | Sequence[str | Path],
        fields: Mapping[str, str] | None = None,
        transforms: Sequence[ImageTransform | ToTensor | Normalize | Mapping[str, Any]] = (),
        classes: Sequence[str] | None = None,
        index: str | Path | None = None,
        max_pixels: int | None = MAX_PIXELS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.all_transforms = list(transforms)
        self.transforms, self._device_params = read_transforms(transforms)
        fields = {"inputs": _IMAGE, "targets": "cls"} if fields is None else fields
        self.shards = TarShards(shard_paths(shards), fields, index, max_bytes)
        self.max_pixels = max_pixels
        self.metainfo: dict[str, Any] = {}
        if classes is not None:
            palette = default_palette(min(len(classes), 256))
            self.metainfo = {"classes": tuple(classes), "palette": palette, "ignore_index": None}

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(
                f"sample index {int(index)} is out of range for WebDataset; use 0 to {len(self) - 1}"
            )
        sample = {field: self._field(int(index), field) for field in self.shards.fields}
        if self.transforms or self._device_params is not None:
            sample["inputs"] = self._transformed(sample.get("inputs"), index)
        return sample if self._device_params is None else {**sample, "device_params": self._device_params}

    def get_cat_ids(self, index: int) -> list[int]:
        """Return a list that contains the class id of sample `index`.

        Raises:
            ConfigError: there is no `targets` field.
            DataError: the file for this field does not contain a class id.
        """
        if "targets" not in self.shards.fields:
            raise ConfigError(
                "is required, because class ids are read from it; set fields['targets'] to the extension of the files "
                "that contain class ids, such as 'cls'",
                "fields.targets",
            )
        value = self._field(index, "targets")
        try:
            return [int(value)]
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise DataError(
                f"'{self.shards.name(index, 'targets')}' does not contain a class id; set fields['targets'] to the "
                "extension of the files that contain class ids, such as 'cls'"
            ) from error

    def _field(self, index: int, field: str) -> Any:
        name, extension = self.shards.name(index, field), self.shards.extension(index, field)
        value = decode_field(name, extension, self.shards.read(index, field), self.max_pixels)
        if field == "targets" and isinstance(value, torch.Tensor) and value.ndim == 0:
            self._check_class(int(value), name)
        return value

    def _check_class(self, class_id: int, name: str) -> None:
        classes = self.metainfo.get("classes")
        if classes and not 0 <= class_id < len(classes):
            raise DataError(
                f"'{name}' contains {class_id}, which is not a class id (0 to {len(classes) - 1}); fix `classes` or "
                "the file"
            )

    def _transformed(self, image: Any, index: int) -> torch.Tensor:
        if not isinstance(image, torch.Tensor) or image.ndim != 3 or image.dtype != torch.uint8:
            kind = type(image).__name__
            if isinstance(image, torch.Tensor):
                kind = f"a {image.dtype} tensor of shape {tuple(image.shape)}"
            raise DataError(
                f"transforms require an image, a uint8 tensor of shape (3, H, W), in the 'inputs' field, not {kind}; "
                "set fields['inputs'] to the extensions of the images"
            )
        pixels, rng = image.numpy(), sample_rng(index)
        for transform in self.transforms:
            pixels = transform(pixels, rng)
        return torch.from_numpy(np.array(pixels, order="C"))


@DATASETS.register_module()
class WebSegmentationDataset(SegmentationDataset):
    """Images and masks in tar shards written by the `webdataset` library, with random access.

    Masks are 8-bit grayscale or palette files whose pixel values are class ids.

    Args:
        shards, index, max_pixels, max_bytes: see `WebDataset`.
        classes: names of the classes, in the order of their ids.
        image: extensions of image files, separated by semicolons; the first extension found in a sample is used.
        mask: extensions of mask files, in the same format.
        ignore_index: id of pixels without a class, or None if every pixel has a class.
        palette: one [r, g, b] color per class; by default, `default_palette`.
        transforms, cache_in_memory, cache: see `SegmentationDataset`.

    Raises:
        DataError: see `WebDataset`; or, when a sample is read, the image and mask sizes differ, or a label id is
            neither a class id nor `ignore_index`.
    """

    def __init__(
        self,
        shards: str | Path | Sequence[str | Path],
        classes: Sequence[str],
        image: str = _IMAGE,
        mask: str = "seg.png;mask.png",
        ignore_index: int | None = 255,
        palette: Sequence[Sequence[int]] | None = None,
        transforms: Sequence[Transform | Mapping[str, Any]] = (),
        cache_in_memory: bool = False,
        cache: str | Path | None = None,
        index: str | Path | None = None,
        max_pixels: int | None = MAX_PIXELS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        super().__init__(transforms, cache_in_memory, cache)
        self.metainfo = segmentation_metainfo(classes, palette, ignore_index)
        self.shards = TarShards(shard_paths(shards), {"image": image, "mask": mask}, index, max_bytes)
        self.max_pixels = max_pixels

    def __len__(self) -> int:
        return len(self.shards)

    def load(self, index: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return image `index` as uint8 (H, W, 3) RGB and its mask as uint8 (H, W)."""
        image = read_image(self._encoded(index, "image"), self.max_pixels)
        encoded = self._encoded(index, "mask")
        mask = read_mask(encoded, self.max_pixels)
        if image.shape[:2] != mask.shape:
            raise DataError(
                f"'{self.shards.name(index, 'image')}' is {image.shape[1]} x {image.shape[0]} pixels, but its mask "
                f"'{encoded}' is {mask.shape[1]} x {mask.shape[0]}; both must have the same size"
            )
        valid = [*range(len(self.metainfo["classes"])), self.metainfo["ignore_index"]]
        if wrong := [i for i in np.unique(mask).tolist() if i not in valid]:
            ignored = self.metainfo["ignore_index"]
            raise DataError(
                f"the mask '{encoded}' has invalid label ids: {', '.join(map(str, wrong))}; valid ids are 0 to "
                f"{len(self.metainfo['classes']) - 1}{'' if ignored is None else f' and ignore_index={ignored}'}"
            )
        return image, mask

    def cache_key(self, index: int) -> tuple[str, str]:
        """Return the sample's name and version.

        The name contains the dataset class, the shard, the byte offset and the file names; the version contains the
        shard's version, the number of classes, and `ignore_index`.
        """
        path = self.shards.path(index)
        version = "-".join(map(str, self.shards.version(index)))
        dataset_class = f"{type(self).__module__}.{type(self).__qualname__}"
        names = [self.shards.name(index, field) for field in self.shards.fields]
        classes = f"{len(self.metainfo['classes'])} {self.metainfo['ignore_index']}"
        place = f"{path.absolute()}:{self.shards.position(index)}"
        return "\n".join([dataset_class, place, *names]), f"{version}-{classes}"

    def _encoded(self, index: int, field: str) -> ImageBytes:
        return ImageBytes(self.shards.name(index, field), self.shards.read(index, field))
