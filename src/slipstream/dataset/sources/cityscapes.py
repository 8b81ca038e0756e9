"""Cityscapes (Cordts et al., CVPR 2016) as it lies on disk after unpacking."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.dataset.sources.base import Transform
from slipstream.dataset.sources.cityscapes_classes import CITYSCAPES_CLASSES, CITYSCAPES_PALETTE
from slipstream.dataset.sources.cityscapes_labels import CITYSCAPES_LABELS
from slipstream.dataset.sources.image_pairs import (
    ImageMaskPairs,
    MaskIds,
    check_pairs,
    files_by_name,
    with_remedy,
)
from slipstream.errors import ConfigError, DataError
from slipstream.registry import DATASETS

__all__ = ["CityscapesDataset"]

_IMAGE, _LABEL_IDS, _TRAIN_IDS = "_leftImg8bit.png", "_gtFine_labelIds.png", "_gtFine_labelTrainIds.png"
_LAYOUT = (
    "Cityscapes lies in leftImg8bit/<split>/<city>/<city>_<sequence>_<frame>_leftImg8bit.png and "
    f"gtFine/<split>/<city>/...{_LABEL_IDS} (or ...{_TRAIN_IDS}) below root_dir (in recipes data_root_dir=FOLDER); "
    "splits are train, val, test"
)
_CLASSES = len(CITYSCAPES_CLASSES)


@DATASETS.register_module()
class CityscapesDataset(ImageMaskPairs):
    """The photographs of Cityscapes with the 19 classes that its benchmark scores.

    Give either `split` or `list_file`. Masks hold label ids or, where the file's name ends in
    `labelTrainIds.png`, train ids; of a split, train ids are read where every photograph has them.
    `image_paths` and `mask_paths` list the files.

    Args:
        root_dir: the folder with `leftImg8bit` and `gtFine`.
        split: `train`, `val` or `test`: the photographs of that folder, in the order of their paths.
        list_file: a text file with an image and its mask in each line, relative to `root_dir` as is the
            file itself.
        labels_csv_path: a table, relative to `root_dir`, whose column `trainId` has the train id of the
            label id in column `id` (without it, of the row's number): 0 to 18, or 255 or -1 for pixels
            that are not scored. By default Cityscapes' own.
        ignore_label: the id, in the samples, of pixels that are not scored.
        transforms: see `SegmentationDataset`.
        cache_labels: keep each mask in memory once it is read (2 MB a mask, in each worker process).
        cache_images: keep each photograph likewise (6 MB).
        cache: see `SegmentationDataset`.
        skip_corrupt: see `ImageMaskFolder`.

    Raises:
        ConfigError: both or neither of `split` and `list_file`; an `ignore_label` that is a class.
        DataError: folders or files are missing (all are named), the table is wrong; and, when a sample is
            read, a file is corrupt, sizes differ, or a mask has an id that Cityscapes does not know.
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
        skip_corrupt: bool = False,
    ) -> None:
        if not _CLASSES <= ignore_label <= 255:
            raise ConfigError(
                f"must be {_CLASSES} to 255, since 0 to {_CLASSES - 1} are classes, not {ignore_label}",
                "ignore_label",
            )
        root = Path(root_dir)
        pairs = _listed(root, list_file, split) if list_file else _of_split(root, split)
        train_ids = _own_train_ids() if labels_csv_path is None else _read_table(root / labels_csv_path)
        self._label_ids = _meaning(
            train_ids, ignore_label, "the label ids of Cityscapes are 0 to 33, and 255"
        )
        same = {i: i for i in range(_CLASSES)} | {255: 255, ignore_label: 255}
        self._train_ids = _meaning(same, ignore_label, "the train ids of Cityscapes are 0 to 18, and 255")
        metainfo = {
            "classes": CITYSCAPES_CLASSES,
            "palette": [list(colour) for colour in CITYSCAPES_PALETTE],
            "ignore_index": ignore_label,
        }
        super().__init__(pairs, metainfo, transforms, cache=cache, skip_corrupt=skip_corrupt)
        self._masks: dict[int, NDArray[np.uint8]] | None = {} if cache_labels else None
        self._images: dict[int, NDArray[np.uint8]] | None = {} if cache_images else None

    def mask_ids(self, path: Path) -> MaskIds:
        """Return what the pixel values of the mask file `path` mean; its name says it."""
        return self._train_ids if path.name.endswith("labelTrainIds.png") else self._label_ids

    def load_image(self, index: int) -> NDArray[np.uint8]:
        """Return image `index` as uint8 (H, W, 3) RGB."""
        return _kept(self._images, index, super().load_image)

    def load_mask(self, index: int) -> NDArray[np.uint8]:
        """Return the mask of sample `index` as uint8 (H, W)."""
        return _kept(self._masks, index, super().load_mask)


def _kept(
    memory: dict[int, NDArray[np.uint8]] | None, index: int, load: Callable[[int], NDArray[np.uint8]]
) -> NDArray[np.uint8]:
    if memory is None:
        return load(index)
    if index not in memory:
        array = load(index)
        array.flags.writeable = False  # who writes into it would change every later epoch
        memory[index] = array
    return memory[index]


def _of_split(root: Path, split: str | None) -> list[tuple[Path, Path]]:
    if split is None:
        raise ConfigError("CityscapesDataset needs a split ('train', 'val' or 'test') or a list_file")
    folder = root / "gtFine" / split
    try:
        images = files_by_name(root / "leftImg8bit" / split, _IMAGE, "image")
        has_train_ids = all((folder / f"{name}{_TRAIN_IDS}").is_file() for name in images)
        masks = files_by_name(folder, _TRAIN_IDS if has_train_ids else _LABEL_IDS, "mask")
    except DataError as error:
        raise with_remedy(error, _LAYOUT) from error
    check_pairs(images, masks, f"images end in {_IMAGE}, masks in {_LABEL_IDS} or {_TRAIN_IDS}")
    return [(images[name], masks[name]) for name in sorted(images)]


def _listed(root: Path, list_file: str, split: str | None) -> list[tuple[Path, Path]]:
    if split is not None:
        raise ConfigError(
            f"give either split or list_file, not both: split={split!r}, list_file={list_file!r} "
            "(in a recipe, set the other one to null)"
        )
    path = root / list_file
    if not path.is_file():
        raise DataError(
            f"the list of samples '{path}' does not exist. Give split: train (or val, test) in place of "
            f"list_file to read the folders themselves. {_LAYOUT}"
        )
    lines = [(number, line.split()) for number, line in enumerate(_text(path).splitlines(), start=1)]
    for number, words in lines:
        if len(words) not in (0, 2):
            raise DataError(
                f"'{path}', line {number}: must be an image and its mask, not {' '.join(words)!r}"
            )
    pairs = [(root / words[0], root / words[1]) for _, words in lines if words]
    missing = [str(file) for pair in pairs for file in pair if not file.is_file()]
    if missing:
        raise DataError(f"{len(missing)} files that '{path}' names do not exist:\n  " + "\n  ".join(missing))
    if not pairs:
        raise DataError(f"the list of samples '{path}' is empty")
    return pairs


def _own_train_ids() -> dict[int, int]:
    # Mask files are 8-bit: -1 arrives as 255.
    return {label.id % 256: label.train_id for label in CITYSCAPES_LABELS}


def _read_table(path: Path) -> dict[int, int]:
    """Return the train id of each label id in a table with the columns `id` and `trainId`."""
    if not path.is_file():
        raise DataError(
            f"the label table '{path}' does not exist; without labels_csv_path, Cityscapes' own ids are taken"
        )
    reader = csv.DictReader(_text(path).splitlines())
    reader.fieldnames = [name.strip().lower() for name in reader.fieldnames or ()]
    if "trainid" not in reader.fieldnames:
        raise DataError(
            f"the label table '{path}' has no column trainId, only {', '.join(reader.fieldnames)}"
        )
    found = {}
    for row_number, row in enumerate(reader):
        label_id, train_id = row.get("id", str(row_number)), row["trainid"]
        try:
            found[int(label_id) % 256] = int(train_id)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"'{path}', line {row_number + 2}: id {label_id!r} and trainId {train_id!r} must be whole numbers"
            ) from error
    wrong = sorted({i for i in found.values() if i not in (*range(_CLASSES), -1, 255)})
    if wrong:
        raise DataError(
            f"the label table '{path}' has the train ids {wrong}; they must be 0 to {_CLASSES - 1}, or 255 or "
            "-1 for pixels that are not scored. For other classes take ImageMaskFolder with a label_map"
        )
    return found | {255: 255}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read '{path}': {error}") from error


def _meaning(train_ids: Mapping[int, int], ignore_label: int, expected: str) -> MaskIds:
    # What is neither a class nor ignored marks the values that no label has.
    unknown = 255 if ignore_label != 255 else 254
    table = np.full(256, unknown, dtype=np.uint8)
    for value, train_id in train_ids.items():
        table[value] = train_id if train_id in range(_CLASSES) else ignore_label
    return MaskIds(table, expected)
