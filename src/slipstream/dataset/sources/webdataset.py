"""Datasets in WebDataset format: tar files in which consecutive files with the same key form a sample."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.dataset.sources.base import (
    ImageDataset,
    SegmentationDataset,
    Transform,
    class_metainfo,
    segmentation_metainfo,
)
from slipstream.dataset.sources.decode import MAX_PIXELS, ImageBytes, read_image, read_mask
from slipstream.dataset.sources.tar_index import MAX_BYTES, TarShards, shard_paths
from slipstream.dataset.transforms.image_transforms import ImageTransforms
from slipstream.errors import ConfigError, DataError
from slipstream.registry import DATASETS

_IMAGE = "jpg;jpeg;png;webp"
_IMAGES = ("bmp", "jpeg", "jpg", "pgm", "png", "ppm", "tif", "tiff", "webp")
_PICKLES = ("pickle", "pkl", "pt", "pth", "pyd")


@DATASETS.register_module()
class WebDataset(ImageDataset):
    """Samples in tar shards written by the `webdataset` library, with random access.

    A sample is a dict with the decoded file of each field: images become uint8 (3, H, W) RGB tensors; `cls`, `cls2`,
    `index` and `inx` become int64 scalar tensors; `npy` becomes a tensor; `json` becomes the parsed value; `txt`,
    `text` and `transcript` become strings; other files remain bytes. With the default fields, a sample is
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
        transforms: ImageTransforms = (),
        classes: Sequence[str] | None = None,
        index: str | Path | None = None,
        max_pixels: int | None = MAX_PIXELS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        super().__init__(transforms)
        fields = fields or {"inputs": _IMAGE, "targets": "cls"}
        for field, text in fields.items():
            if pickled := [
                word for word in text.split(";") if word.strip().rpartition(".")[2].lower() in _PICKLES
            ]:
                raise ConfigError(
                    f"'{pickled[0]}' files are pickled and can run code; convert them", f"fields.{field}"
                )
        self.shards = TarShards(shard_paths(shards), fields, index, max_bytes)
        self.max_pixels = max_pixels
        self.metainfo = {} if classes is None else class_metainfo(classes)

    def __len__(self) -> int:
        return len(self.shards)

    def load(self, index: int) -> dict[str, Any]:
        """Return the decoded files of sample `index`."""
        return {field: self._field(index, field) for field in self.shards.fields}

    def get_cat_ids(self, index: int) -> list[int]:
        """Return a list that contains the class id of sample `index`, which the `targets` field contains."""
        if "targets" not in self.shards.fields:
            raise ConfigError("is required, because class ids are read from it", "fields.targets")
        return [int(self._field(index, "targets"))]

    def _field(self, index: int, field: str) -> Any:
        name, data = self.shards.name(index, field), self.shards.read(index, field)
        kind = self.shards.extension(index, field)
        if kind in _IMAGES:
            return read_image(ImageBytes(name, data), self.max_pixels).transpose(2, 0, 1)
        try:
            value = _DECODERS.get(kind, bytes)(data)
        except Exception as error:  # NumPy can raise various exceptions for a damaged header
            raise DataError(f"cannot read '{name}': {error}; replace the file") from error
        classes = self.metainfo.get("classes")
        if field == "targets" and kind == "cls" and classes and not 0 <= int(value) < len(classes):
            raise DataError(f"'{name}' contains {int(value)}, not a class id (0 to {len(classes) - 1})")
        return value


def _array(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.lib.format.read_array(io.BytesIO(data), allow_pickle=False))


_DECODERS: Mapping[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("cls", "cls2", "index", "inx"), lambda data: torch.tensor(np.int64(int(data)))),
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    "json": json.loads,
    "npy": _array,
}


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
        files = self._encoded(index, "image"), self._encoded(index, "mask")
        image, mask = read_image(files[0], self.max_pixels), read_mask(files[1], self.max_pixels)
        self.check_sizes(image, files[0], mask, files[1])
        self.check_mask(mask, mask, files[1])
        return image, mask

    def cache_key(self, index: int) -> tuple[str, str]:
        """Return a name (dataset class and files) and a version (of the shard and of the class ids)."""
        place = f"{self.shards.path(index).absolute()}:{self.shards.position(index)}"
        names = [self.shards.name(index, field) for field in self.shards.fields]
        return self.sample_key([place, *names], self.shards.version(index))

    def _encoded(self, index: int, field: str) -> ImageBytes:
        return ImageBytes(self.shards.name(index, field), self.shards.read(index, field))
