"""Segmentation datasets that consist of a folder of images and a folder of masks, paired by file name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.dataset.sources.base import Transform, segmentation_metainfo
from slipstream.dataset.sources.decode import MAX_PIXELS
from slipstream.dataset.sources.image_pairs import (
    ImageMaskPairs,
    MaskIds,
    check_pairs,
    files_by_name,
    with_remedy,
)
from slipstream.errors import ConfigError, DataError
from slipstream.registry import DATASETS

__all__ = ["ImageMaskFolder"]


_REMEDY = "set data_root (in SuperGradients' recipes, data_root_dir=FOLDER) to the dataset's folder"


@DATASETS.register_module()
class ImageMaskFolder(ImageMaskPairs):
    """Images and masks in two folders and their subfolders, paired by their paths without the suffix.

    Masks are 8-bit grayscale or palette files whose pixel values are class ids. Samples are sorted by path.
    The `image_paths` and `mask_paths` attributes list the files.

    Args:
        data_root: the folder that `images` and `masks` are relative to.
        images: image folder, relative to `data_root`.
        masks: mask folder, relative to `data_root`.
        classes: class names for the ids 0, 1, ...
        ignore_index: id of pixels without a class, or None if every pixel has a class.
        palette: one [r, g, b] per class; by default, `default_palette`.
        image_suffix: suffix of image file names, such as `_leftImg8bit.png`; by default, any supported extension.
            Other files are ignored. The path without the suffix is the name of the pair.
        mask_suffix: suffix of mask file names, such as `_gtFine_labelIds.png`; by default, the extension of any
            supported lossless format.
        label_map: maps ids in the files to class ids (or `ignore_index`); other ids are not changed.
        transforms, cache_in_memory, cache: see `SegmentationDataset`.
        skip_corrupt: read every file once when the dataset is created, and skip samples with unreadable files. A
            warning is logged for each unreadable file.
        max_pixels: maximum number of pixels in a file; None for no limit. Even a small file can decode to a huge image.

    Raises:
        DataError: a folder is missing or has no matching files, or a file has no counterpart; or, when a sample is
            read, a file is corrupt, the image and mask sizes differ, or a label id is neither a class id nor
            `ignore_index`.
        ConfigError: `palette`, `label_map` or `ignore_index` does not match the classes.
    """

    def __init__(
        self,
        data_root: str | Path,
        images: str,
        masks: str,
        classes: Sequence[str],
        ignore_index: int | None = 255,
        palette: Sequence[Sequence[int]] | None = None,
        image_suffix: str | None = None,
        mask_suffix: str | None = None,
        label_map: Mapping[int, int] | None = None,
        transforms: Sequence[Transform | Mapping[str, Any]] = (),
        cache_in_memory: bool = False,
        cache: str | Path | None = None,
        skip_corrupt: bool = False,
        max_pixels: int | None = MAX_PIXELS,
    ) -> None:
        metainfo = segmentation_metainfo(classes, palette, ignore_index)
        table = _label_table(label_map or {}, len(classes), ignore_index)
        image_root, mask_root = Path(data_root) / images, Path(data_root) / masks
        try:
            image_files = files_by_name(image_root, image_suffix, "image")
            mask_files = files_by_name(mask_root, mask_suffix, "mask")
        except DataError as error:
            folders = f"Images must be in '{image_root}', masks in '{mask_root}'"
            raise with_remedy(error, f"{folders}; {_REMEDY}") from error
        check_pairs(
            image_files, mask_files, "set image_suffix and mask_suffix if the names have different suffixes"
        )
        pairs = [(image_files[name], mask_files[name]) for name in sorted(image_files)]
        super().__init__(pairs, metainfo, transforms, cache_in_memory, cache, skip_corrupt, max_pixels)
        ignored = "" if ignore_index is None else f", or ignore_index={ignore_index}"
        self._mask_ids = MaskIds(
            table,
            f"with {len(classes)} class{'es' * (len(classes) != 1)}, they must be 0 to {len(classes) - 1}{ignored}. "
            "Add them to label_map, or correct classes or ignore_index",
        )

    def mask_ids(self, path: Path) -> MaskIds:
        """Return the mapping from pixel values to class ids, which is the same for all mask files."""
        return self._mask_ids


def _label_table(
    label_map: Mapping[int, int], num_classes: int, ignore_index: int | None
) -> np.ndarray[Any, Any] | None:
    """Return the new id for each of the 256 possible ids in a file, or None if no id changes."""
    table = np.arange(256, dtype=np.uint8)
    for old, new in label_map.items():
        if not 0 <= old <= 255 or not (0 <= new < num_classes or new == ignore_index):
            raise ConfigError(
                f"label_map: {old} -> {new} must map a pixel value (0 to 255) to a class id "
                f"(0 to {num_classes - 1}){'' if ignore_index is None else f' or to ignore_index={ignore_index}'}"
            )
        table[old] = new
    return table if label_map else None
