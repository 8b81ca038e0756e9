"""Image classification datasets that consist of one folder per class, such as ImageNet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slipstream.dataset.sources.base import ImageDataset, class_metainfo
from slipstream.dataset.sources.decode import MAX_PIXELS, read_image
from slipstream.dataset.sources.image_folder import files_by_name
from slipstream.dataset.transforms.image_transforms import ImageTransforms
from slipstream.errors import DataError
from slipstream.registry import DATASETS

__all__ = ["ImageNetDataset"]

_LAYOUT = "The expected layout is root/CLASS/IMAGE, with one folder for each class"


@DATASETS.register_module()
class ImageNetDataset(ImageDataset):
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
        transforms: ImageTransforms = (),
        max_pixels: int | None = MAX_PIXELS,
    ) -> None:
        super().__init__(transforms)
        self.max_pixels = max_pixels
        files = files_by_name(Path(root), None, "image").values()
        names = [path.relative_to(root).parts for path in files]
        if unclassified := [path for path, parts in zip(files, names, strict=True) if len(parts) < 2]:
            raise DataError(f"'{unclassified[0]}' is not in a class folder. {_LAYOUT}")
        classes = sorted({parts[0] for parts in names})
        ids = {name: index for index, name in enumerate(classes)}
        self.image_paths = list(files)
        self.targets = torch.tensor([ids[parts[0]] for parts in names])
        self.metainfo = class_metainfo(classes)

    def __len__(self) -> int:
        return len(self.image_paths)

    def load(self, index: int) -> dict[str, Any]:
        """Return image `index` and its class id."""
        image = read_image(self.image_paths[index], self.max_pixels).transpose(2, 0, 1)
        return {"inputs": image, "targets": self.targets[index]}

    def get_cat_ids(self, index: int) -> list[int]:
        """Return a list that contains the class id of sample `index`."""
        return [int(self.targets[index])]
