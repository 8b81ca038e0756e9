"""Image classification datasets that consist of one folder per class, such as ImageNet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from slipstream.dataset.loading.generators import sample_rng
from slipstream.dataset.sources.base import default_palette
from slipstream.dataset.sources.decode import MAX_PIXELS, read_image
from slipstream.dataset.sources.image_pairs import files_by_name, with_remedy
from slipstream.dataset.transforms.image_transforms import (
    ImageTransform,
    Normalize,
    ToTensor,
    read_transforms,
)
from slipstream.errors import DataError
from slipstream.registry import DATASETS

__all__ = ["ImageNetDataset"]

_LAYOUT = "The expected layout is root/CLASS/IMAGE, with one folder for each class"


@DATASETS.register_module()
class ImageNetDataset(Dataset[dict[str, torch.Tensor]]):
    """Images in folders, one folder for each class. Class ids are assigned in the order of the sorted folder names.

    A sample is `{"inputs": uint8 (3, H, W) RGB, "targets": int64 ()}`. If the transforms contain `ToTensor`, it also
    contains `"device_params"`, the device transform parameters. Augmentation depends only on the (seed, epoch, index)
    of a `SampleIndex`. The `image_paths` attribute lists the files. `all_transforms` lists the transforms, including
    the device transforms.

    Args:
        root: folder that contains the class folders.
        transforms: `RandomResizedCropAndInterpolation`, `RandomHorizontalFlip`, `RandAugmentTransform`, `Resize`,
            `CenterCrop`, `RandomCrop`, or functions that take an image, uint8 (3, H, W), and a generator;
            followed by `ToTensor` and `Normalize`. Dicts are built with `TRANSFORMS`.
        max_pixels: maximum number of pixels in a file; None for no limit.

    Raises:
        DataError: the folder is missing or contains no images, or an image is not in a class folder; or, when a sample
            is read, a file is corrupt.
        ConfigError: the order of the transforms is not supported.
    """

    def __init__(
        self,
        root: str | Path,
        transforms: Sequence[ImageTransform | ToTensor | Normalize | Mapping[str, Any]] = (),
        max_pixels: int | None = MAX_PIXELS,
    ) -> None:
        self.all_transforms = list(transforms)
        self.transforms, self._device_params = read_transforms(transforms)
        self.max_pixels = max_pixels
        folder = Path(root)
        try:
            files = files_by_name(folder, None, "image")
        except DataError as error:
            raise with_remedy(error, f"{_LAYOUT} (in recipes, set data_root_dir=FOLDER)") from error
        parts = [(path.relative_to(folder).parts, path) for path in files.values()]
        if unclassified := [path for names, path in parts if len(names) < 2]:
            raise DataError(f"'{unclassified[0]}' is not in a class folder. {_LAYOUT}")
        classes = sorted({names[0] for names, _ in parts})
        ids = {name: index for index, name in enumerate(classes)}
        self.image_paths = [path for _, path in parts]
        self.targets = torch.tensor([ids[names[0]] for names, _ in parts])
        self.metainfo = {
            "classes": tuple(classes),
            "palette": default_palette(min(len(classes), 256)),
            "ignore_index": None,
        }

    def __len__(self) -> int:
        return len(self.image_paths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(
                f"sample index {int(index)} is out of range for ImageNetDataset; use 0 to {len(self) - 1}"
            )
        image = read_image(self.image_paths[int(index)], self.max_pixels).transpose(2, 0, 1)
        rng = sample_rng(index)
        for transform in self.transforms:
            image = transform(image, rng)
        sample = {"inputs": torch.from_numpy(np.array(image, order="C")), "targets": self.targets[int(index)]}
        return sample if self._device_params is None else {**sample, "device_params": self._device_params}

    def get_cat_ids(self, index: int) -> list[int]:
        """Return a list that contains the class id of sample `index`."""
        return [int(self.targets[index])]
