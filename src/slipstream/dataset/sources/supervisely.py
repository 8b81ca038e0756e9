"""Supervisely Persons dataset, read from CSV list files in SuperGradients' format."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.dataset.sources.base import Transform, default_palette
from slipstream.dataset.sources.decode import MAX_PIXELS
from slipstream.dataset.sources.image_pairs import ImageMaskPairs, MaskIds
from slipstream.errors import DataError
from slipstream.registry import DATASETS

__all__ = ["SuperviselyPersonsDataset"]

_CLASSES = ("background", "person")
_MAX_LISTED_FILES = 5


@DATASETS.register_module()
class SuperviselyPersonsDataset(ImageMaskPairs):
    """Images of people, with masks whose pixels are 0 (background) or 1 (person).

    Args:
        root_dir: root folder of the dataset.
        list_file: CSV file with the paths of an image and its mask in each row. All paths, including `list_file`, are
            relative to `root_dir`.
        transforms, cache: see `SegmentationDataset`.
        cache_labels, cache_images: if either is True, keep each image and its mask in memory after the first read.
        skip_corrupt, max_pixels: see `ImageMaskFolder`.

    Raises:
        DataError: the list file or a listed file is missing, or a row has no mask; or, when a sample is read, a file
            is corrupt, the image and mask sizes differ, or a mask contains a value other than 0 and 1.
    """

    def __init__(
        self,
        root_dir: str | Path,
        list_file: str,
        transforms: Sequence[Transform | Mapping[str, Any]] = (),
        cache_labels: bool = False,
        cache_images: bool = False,
        cache: str | Path | None = None,
        skip_corrupt: bool = False,
        max_pixels: int | None = MAX_PIXELS,
    ) -> None:
        metainfo = {"classes": _CLASSES, "palette": default_palette(2), "ignore_index": None}
        pairs = _read_table(Path(root_dir), list_file)
        in_memory = cache_labels or cache_images
        super().__init__(pairs, metainfo, transforms, in_memory, cache, skip_corrupt, max_pixels)

    def mask_ids(self, path: Path) -> MaskIds:
        """Return the identity mapping, because pixel values are class ids."""
        return MaskIds(None, "they must be 0 (background) or 1 (person)")


def _read_table(root: Path, list_file: str) -> list[tuple[Path, Path]]:
    path = root / list_file
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"cannot read the list file '{path}': {error}; check root_dir and list_file"
        ) from error
    if not rows:
        raise DataError(f"the list file '{path}' is empty; set list_file to a file that lists images")
    for number, row in enumerate(rows, start=1):
        if len(row) < 2:
            raise DataError(
                f"row {number} of '{path}' must contain the paths of an image and its mask, not {row}"
            )
    pairs = [(root / row[0], root / row[1]) for row in rows]
    missing = [str(file) for pair in pairs for file in pair if not file.is_file()]
    if missing:
        raise DataError(
            f"files listed in '{path}' do not exist: {', '.join(missing[:_MAX_LISTED_FILES])} ({len(missing)} in "
            "total); set root_dir to the folder that contains them"
        )
    return pairs
