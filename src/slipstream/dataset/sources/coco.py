"""COCO segmentation dataset with masks made from the instance annotations. Arguments are named as in SuperGradients."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from slipstream.dataset.sources.base import SegmentationDataset, Transform, default_palette
from slipstream.dataset.sources.coco_masks import Outline, fill_polygon, fill_runs, read_outline
from slipstream.dataset.sources.decode import MAX_PIXELS, read_image
from slipstream.dataset.sources.image_pairs import check_folder
from slipstream.errors import ConfigError, DataError
from slipstream.files import atomic_write, user_cache
from slipstream.logging import print_log
from slipstream.registry import DATASETS

__all__ = ["CoCoSegmentationDataSet"]

_VOC_CLASSES = (
    (0, "background"), (5, "airplane"), (2, "bicycle"), (16, "bird"), (9, "boat"), (44, "bottle"), (6, "bus"),
    (3, "car"), (17, "cat"), (62, "chair"), (21, "cow"), (67, "dining table"), (18, "dog"), (19, "horse"),
    (4, "motorcycle"), (1, "person"), (64, "potted plant"), (20, "sheep"), (63, "couch"), (7, "train"), (72, "tv"),
)  # fmt: skip
"""COCO ids and names of the categories that correspond to the PASCAL VOC classes, in SuperGradients' order."""
_MIN_PIXELS = 1000
"""Images are excluded if at most this many of their pixels have an id other than 0, as in SuperGradients."""


@dataclass(frozen=True)
class _Image:
    image_id: int
    """Image id in the annotation file."""
    name: str
    shape: tuple[int, int]
    """Height and width."""
    outlines: Sequence[tuple[int, Outline]]
    """Class id and outline of each instance, in the order of the file."""

    def mask(self) -> NDArray[np.uint8]:
        """Return the class ids, uint8 (H, W). Where instances overlap, the first one in the file is visible."""
        mask = np.zeros(self.shape, np.uint8)
        for class_id, outline in self.outlines:
            parts = (
                [fill_polygon(points, self.shape) for points in outline]
                if isinstance(outline, list)
                else [fill_runs(outline, self.shape)]
            )
            for part in parts:
                mask[part & (mask == 0)] = class_id
        return mask


@DATASETS.register_module()
class CoCoSegmentationDataSet(SegmentationDataset):
    """COCO images, with semantic masks made from the instance annotations. Pixels outside the instances have class 0.

    Images are excluded if at most 1,000 of their pixels have an id other than 0. To select the images, all masks are
    read once, which takes minutes for COCO's training data. The selection is stored in the user's cache folder.

    Args:
        root_dir: folder of the dataset.
        list_file: annotation file (JSON) in `targets_sub_directory`, such as `instances_train2017.json`.
        samples_sub_directory: folder of the images, relative to `root_dir`.
        targets_sub_directory: folder of the annotation file, relative to `root_dir`.
        dataset_classes_inclusion_tuples_list: category id and name of each class, or 'voc' for the 21 classes of
            PASCAL VOC. Instances of other categories are ignored. The first entry is the class of the pixels outside
            the instances, so its category id must not occur in the file, except with the name 'background'. By default,
            all categories are used, and class ids are category ids.
        transforms, cache: see `SegmentationDataset`.
        cache_labels, cache_images: if either is True, keep each image and its mask in memory after the first read.
        max_pixels: see `ImageMaskFolder`.

    Raises:
        ConfigError: the list of classes is invalid, or instances would have class 0.
        DataError: the annotation file is missing or invalid, or no image remains; or, when a sample is read, the image
            is corrupt, or its size differs from the size in the annotation file.
    """

    def __init__(
        self,
        root_dir: str | Path,
        list_file: str,
        samples_sub_directory: str,
        targets_sub_directory: str,
        dataset_classes_inclusion_tuples_list: Iterable[Sequence[Any]] | Literal["voc"] | None = None,
        transforms: Sequence[Transform | Mapping[str, Any]] = (),
        cache_labels: bool = False,
        cache_images: bool = False,
        cache: str | Path | None = None,
        max_pixels: int | None = MAX_PIXELS,
    ) -> None:
        super().__init__(transforms, cache_labels or cache_images, cache)
        self.image_folder = Path(root_dir) / samples_sub_directory
        check_folder(self.image_folder, "image")
        self.max_pixels = max_pixels
        path = Path(root_dir) / targets_sub_directory / list_file
        content = _read_json(path)
        self._classes = _read_classes(dataset_classes_inclusion_tuples_list, content, path)
        names = tuple(name for _, name in self._classes)
        self.metainfo = {"classes": names, "palette": default_palette(len(names)), "ignore_index": None}
        self._version = _version(path, self._classes)
        images = _read_images(content, [category_id for category_id, _ in self._classes], path)
        _check_background(self._classes, content, path)
        self._images = _select_images(images, user_cache("coco") / f"{self._version}.json", path)

    def __len__(self) -> int:
        return len(self._images)

    @property
    def samples_targets_tuples_list(self) -> list[tuple[str, tuple[int, int, int]]]:
        """The image path and (image id, height, width) of each sample. SuperGradients uses the same name."""
        return [(str(self.image_folder / i.name), (i.image_id, *i.shape)) for i in self._images]

    def load(self, index: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return image `index` as uint8 (H, W, 3) RGB and its mask as uint8 (H, W)."""
        entry = self._images[index]
        image = read_image(self.image_folder / entry.name, self.max_pixels)
        if image.shape[:2] != entry.shape:
            raise DataError(
                f"'{self.image_folder / entry.name}' is {image.shape[1]} x {image.shape[0]} pixels, but "
                f"{entry.shape[1]} x {entry.shape[0]} in the annotation file; replace the image or correct "
                "the annotation file"
            )
        return image, entry.mask()

    def cache_key(self, index: int) -> tuple[str, str]:
        """Return a name (dataset class, image path, image id) and a version (of the image and the annotation file)."""
        entry = self._images[index]
        path = self.image_folder / entry.name
        try:
            stat = path.stat()
        except OSError as error:
            raise DataError(f"cannot read '{path}': {error.strerror}") from error
        dataset_class = f"{type(self).__module__}.{type(self).__qualname__}"
        return (
            f"{dataset_class}\n{path.absolute()}\n{entry.image_id}",
            f"{stat.st_size}-{stat.st_mtime_ns}-{self._version}",
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"cannot read the annotation file '{path}': {error}; check root_dir, "
            "targets_sub_directory and list_file"
        ) from error
    if not isinstance(content, dict):
        raise DataError(f"the annotation file '{path}' must contain images, annotations and categories")
    return content


def _read_classes(
    selection: Iterable[Sequence[Any]] | Literal["voc"] | None, content: Mapping[str, Any], path: Path
) -> list[tuple[int, str]]:
    """Return the category id and the name of each class."""
    if selection is None:
        names = {0: "background", **_category_names(content, path)}
        if max(names) < 256:
            return [(i, names.get(i, f"unused {i}")) for i in range(max(names) + 1)]
        raise ConfigError(
            "is required, because a category id is greater than 255", "dataset_classes_inclusion_tuples_list"
        )
    pairs: Any = _VOC_CLASSES if selection == "voc" else selection
    try:
        classes = [(int(category_id), str(name)) for category_id, name in pairs]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"must be 'voc' or a list of [category id, name]: {error}",
            "dataset_classes_inclusion_tuples_list",
        ) from error
    if not 1 <= len(classes) <= 256 or len(dict(classes)) != len(classes):
        raise ConfigError(
            "must contain 1 to 256 classes with distinct category ids",
            "dataset_classes_inclusion_tuples_list",
        )
    return classes


def _category_names(content: Mapping[str, Any], path: Path) -> dict[int, str]:
    try:
        return {int(category["id"]): str(category["name"]) for category in content["categories"]}
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"the categories in the annotation file '{path}' are invalid: {error!r}; use the COCO format"
        ) from error


def _read_images(content: Mapping[str, Any], categories: list[int], path: Path) -> list[_Image]:
    """Return the images in the annotation file, with their instances of these categories."""
    class_ids = {category_id: class_id for class_id, category_id in enumerate(categories)}
    try:
        images = {
            entry["id"]: _Image(
                int(entry["id"]), str(entry["file_name"]), (int(entry["height"]), int(entry["width"])), []
            )
            for entry in content["images"]
        }
        outlines: dict[Any, list[tuple[int, Outline]]] = {image_id: [] for image_id in images}
        for entry in content["annotations"]:
            if (class_id := class_ids.get(entry["category_id"])) is not None and entry["image_id"] in images:
                outline = read_outline(entry["segmentation"], images[entry["image_id"]].shape)
                outlines[entry["image_id"]].append((class_id, outline))
    except DataError as error:  # from read_outline; DataError is a ValueError
        raise DataError(
            f"annotation {entry.get('id')} of image {entry['image_id']} in '{path}': {error}"
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"the annotation file '{path}' is invalid: {error!r}; use the COCO format") from error
    return [
        _Image(image.image_id, image.name, image.shape, tuple(outlines[key])) for key, image in images.items()
    ]


def _check_background(classes: list[tuple[int, str]], content: Mapping[str, Any], path: Path) -> None:
    """Raise a ConfigError if a category in the annotation file is assigned class 0, the background class."""
    background = classes[0][0]
    names = _category_names(content, path) if "categories" in content else {}
    category_ids = {*names, *(entry["category_id"] for entry in content["annotations"])}
    if background not in category_ids or names.get(background, "").lower() == "background":
        return
    unused_id = max(i for i in [*category_ids, *dict(classes)] if isinstance(i, int)) + 1
    name = f" ({names[background]!r})" if background in names else ""
    raise ConfigError(
        f"category {background}{name} in '{path}' would have class 0, which is the class of all pixels outside the "
        f"instances; list the classes, and put [{unused_id}, 'background'] first (the id {unused_id} is unused)",
        "dataset_classes_inclusion_tuples_list",
    )


def _select_images(images: list[_Image], selection_file: Path, path: Path) -> list[_Image]:
    """Return the images that are not excluded; their ids are stored in `selection_file`."""
    try:
        image_ids = set(json.loads(selection_file.read_bytes()))
    except (OSError, ValueError, TypeError):
        count = f"{len(images)} image{'s' * (len(images) != 1)}"
        print_log(f"selecting images from '{path}': reading the masks of {count}", "current")
        image_ids = {image.image_id for image in images if np.count_nonzero(image.mask()) > _MIN_PIXELS}
        _store(selection_file, sorted(image_ids))
    selected = [image for image in images if image.image_id in image_ids]
    if not selected:
        raise DataError(
            f"no image in the annotation file '{path}' has more than {_MIN_PIXELS} pixels in its instances; check "
            "dataset_classes_inclusion_tuples_list"
        )
    return selected


def _store(selection_file: Path, image_ids: list[int]) -> None:
    try:
        selection_file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(selection_file) as temporary:
            temporary.write_text(json.dumps(image_ids))
    except OSError as error:
        print_log(
            f"cannot write '{selection_file}' ({error.strerror or error}); the next run will select the images again",
            "current",
            logging.WARNING,
        )


def _version(path: Path, classes: list[tuple[int, str]]) -> str:
    """Return a digest that changes with the annotation file or with the classes."""
    stat = path.stat()
    text = f"{path.absolute()} {stat.st_size} {stat.st_mtime_ns} {classes} {_MIN_PIXELS}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
