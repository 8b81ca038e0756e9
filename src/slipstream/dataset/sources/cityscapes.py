"""Cityscapes (Cordts et al., CVPR 2016), read from its unpacked folders."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.dataset.sources.base import Transform
from slipstream.dataset.sources.cityscapes_labels import (
    CITYSCAPES_CLASSES,
    CITYSCAPES_LABELS,
    CITYSCAPES_PALETTE,
)
from slipstream.dataset.sources.decode import MAX_PIXELS
from slipstream.dataset.sources.image_folder import ImageMaskPairs, files_by_name, pair_files, read_pair_list
from slipstream.dataset.sources.wrappers import ConcatDataset
from slipstream.errors import ConfigError, DataError
from slipstream.registry import DATASETS

_IMAGE, _LABEL_IDS, _TRAIN_IDS = "_leftImg8bit.png", "_gtFine_labelIds.png", "_gtFine_labelTrainIds.png"
_LAYOUT = (
    "The expected layout is leftImg8bit/<split>/<city>/<city>_<sequence>_<frame>_leftImg8bit.png and "
    f"gtFine/<split>/<city>/...{_LABEL_IDS} (or ...{_TRAIN_IDS}) in root_dir (in recipes, data_root_dir=FOLDER); "
    "splits are train, val, test. To read these folders, set split instead of list_file"
)
_CLASSES = len(CITYSCAPES_CLASSES)


@DATASETS.register_module()
class CityscapesDataset(ImageMaskPairs):
    """Cityscapes images with the 19 classes of the benchmark.

    Pass either `split` or `list_file`. Mask files contain label ids or, if their names end with `labelTrainIds.png`,
    train ids. For a split, train ids are used if they exist for every image. The `image_paths` and
    `mask_paths` attributes list the files.

    Args:
        root_dir: folder that contains `leftImg8bit` and `gtFine`.
        split: `train`, `val` or `test`. Samples are sorted by path.
        list_file: text file with the paths of an image and its mask on each line. All paths, including the path of the
            list file itself, are relative to `root_dir`.
        labels_csv_path: CSV table, relative to `root_dir`, that maps each label id (column `id`, or the row number if
            this column is missing) to a train id (column `trainId`): 0 to 18, or 255 or -1 for pixels that are not
            scored. By default, the Cityscapes table is used.
        ignore_label: id of unscored pixels in the samples.
        transforms: see `SegmentationDataset`.
        cache_labels: keep each mask in memory after the first read (2 MB per mask, in each worker process).
        cache_images: keep each image in memory after the first read (6 MB per image).
        cache: see `SegmentationDataset`.
        max_pixels: see `ImageMaskFolder`.

    Raises:
        ConfigError: both or neither of `split` and `list_file` are set, or `ignore_label` is a class id.
        DataError: folders or files are missing (the message lists them), or the table is invalid; or, when a sample
            is read, a file is corrupt, the image and mask sizes differ, or a mask contains an unknown id.
    """

    def __init__(
        self,
        root_dir: str | Path,
        split: str | None = None,
        list_file: str | None = None,
        labels_csv_path: str | None = None,
        ignore_label: int = 19,
        transforms: Sequence[Transform | Mapping[str, Any]] = (),
        cache_labels: bool = False,
        cache_images: bool = False,
        cache: str | Path | None = None,
        max_pixels: int | None = MAX_PIXELS,
    ) -> None:
        if not _CLASSES <= ignore_label <= 255:
            raise ConfigError(f"must be from {_CLASSES} to 255, not {ignore_label}", "ignore_label")
        root = Path(root_dir)
        if (split is None) == (list_file is None):
            raise ConfigError("requires either a split or a list_file", "CityscapesDataset")
        try:
            pairs = read_pair_list(root, list_file) if list_file else _find_pairs(root, str(split))
        except DataError as error:
            raise DataError(f"{error} ({_LAYOUT})") from error
        # Mask files are 8-bit, so -1 is stored as 255.
        label_ids = {label.id % 256: label.train_id for label in CITYSCAPES_LABELS}
        if labels_csv_path is not None:
            label_ids = _read_table(root / labels_csv_path)
        self._label_ids = _mask_table(label_ids, ignore_label)
        identity = {i: i for i in range(_CLASSES)} | {255: 255, ignore_label: 255}
        self._train_ids = _mask_table(identity, ignore_label)
        metainfo = {
            "classes": CITYSCAPES_CLASSES,
            "palette": [list(color) for color in CITYSCAPES_PALETTE],
            "ignore_index": ignore_label,
        }
        super().__init__(pairs, metainfo, transforms, cache=cache, max_pixels=max_pixels)
        self._masks: dict[int, NDArray[np.uint8]] | None = {} if cache_labels else None
        self._images: dict[int, NDArray[np.uint8]] | None = {} if cache_images else None

    def mask_table(self, path: Path) -> NDArray[np.uint8]:
        """Return the class id for each pixel value of a mask file, which depends on the file's name."""
        return self._train_ids if path.name.endswith("labelTrainIds.png") else self._label_ids

    def load_image(self, index: int) -> NDArray[np.uint8]:
        """Return image `index` as uint8 (H, W, 3) RGB."""
        return _cached(self._images, index, super().load_image)

    def load_mask(self, index: int) -> NDArray[np.uint8]:
        """Return the mask of sample `index` as uint8 (H, W)."""
        return _cached(self._masks, index, super().load_mask)


@DATASETS.register_module()
class CityscapesConcatDataset(ConcatDataset):
    """Cityscapes images from several list files, such as the training list and a list of automatically labeled images.

    Args:
        root_dir: see `CityscapesDataset`.
        list_files: list files, in the order of the samples; see `CityscapesDataset`.
        options: other arguments for `CityscapesDataset`.

    Raises:
        ConfigError: `list_files` is empty.
        DataError: see `CityscapesDataset`.
    """

    def __init__(self, root_dir: str | Path, list_files: Sequence[str], **options: Any) -> None:
        if isinstance(list_files, str) or not list_files:
            raise ConfigError(f"must be a list of files, not {list_files!r}", "list_files")
        super().__init__([CityscapesDataset(root_dir, list_file=file, **options) for file in list_files])


def _cached(
    memory: dict[int, NDArray[np.uint8]] | None, index: int, load: Callable[[int], NDArray[np.uint8]]
) -> NDArray[np.uint8]:
    if memory is None:
        return load(index)
    if index not in memory:
        array = load(index)
        array.flags.writeable = False  # prevents transforms from modifying the cached array
        memory[index] = array
    return memory[index]


def _find_pairs(root: Path, split: str) -> list[tuple[Path, Path]]:
    folder = root / "gtFine" / split
    images = files_by_name(root / "leftImg8bit" / split, _IMAGE, "image")
    has_train_ids = all((folder / f"{name}{_TRAIN_IDS}").is_file() for name in images)
    return pair_files(images, files_by_name(folder, _TRAIN_IDS if has_train_ids else _LABEL_IDS, "mask"))


def _read_table(path: Path) -> dict[int, int]:
    """Return the train id of each label id in a table with `id` and `trainId` columns."""
    try:
        reader = csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines())
        reader.fieldnames = [name.strip().lower() for name in reader.fieldnames or ()]
        if "trainid" not in reader.fieldnames:
            raise KeyError("trainId")
        ids = {int(row.get("id", number)) % 256: int(row["trainid"]) for number, row in enumerate(reader)}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"cannot read a trainId column from '{path}': {error!r}") from error
    if wrong := sorted({i for i in ids.values() if i not in (*range(_CLASSES), -1, 255)}):
        raise DataError(
            f"'{path}' contains invalid train ids: {wrong}; use 0 to {_CLASSES - 1}, or 255 or -1 for pixels that are "
            "not scored. For other classes, use ImageMaskFolder with a label_map"
        )
    return ids | {255: 255}


def _mask_table(train_ids: Mapping[int, int], ignore_label: int) -> NDArray[np.uint8]:
    # Unknown values map to an id that is neither a class nor ignored.
    table = np.full(256, 255 if ignore_label != 255 else 254, dtype=np.uint8)
    for value, train_id in train_ids.items():
        table[value] = train_id if train_id in range(_CLASSES) else ignore_label
    return table
