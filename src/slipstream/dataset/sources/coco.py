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

from slipstream.dataset.sources.base import SegmentationDataset, Transform, default_palette, file_version
from slipstream.dataset.sources.decode import MAX_PIXELS, read_image
from slipstream.dataset.sources.image_folder import check_folder
from slipstream.errors import ConfigError, DataError
from slipstream.extras import extra
from slipstream.files import atomic_write, user_cache
from slipstream.logging import print_log
from slipstream.registry import DATASETS

# COCO ids and names of the categories that correspond to the PASCAL VOC classes, in SuperGradients' order.
_VOC_CLASSES = (
    (0, "background"), (5, "airplane"), (2, "bicycle"), (16, "bird"), (9, "boat"), (44, "bottle"), (6, "bus"),
    (3, "car"), (17, "cat"), (62, "chair"), (21, "cow"), (67, "dining table"), (18, "dog"), (19, "horse"),
    (4, "motorcycle"), (1, "person"), (64, "potted plant"), (20, "sheep"), (63, "couch"), (7, "train"), (72, "tv"),
)  # fmt: skip
# Images are excluded if at most this many of their pixels have an id other than 0, as in SuperGradients.
_MIN_PIXELS = 1000


_SELECTION = "dataset_classes_inclusion_tuples_list"


@dataclass(frozen=True)
class _Image:
    # Image id in the annotation file.
    image_id: int
    name: str
    # Height and width.
    shape: tuple[int, int]
    # Class id and segmentation of each instance, in the order of the file.
    instances: list[tuple[int, Any]]

    def mask(self) -> NDArray[np.uint8]:
        """Return the class ids, uint8 (H, W). Where instances overlap, the first one in the file is visible."""
        with extra("coco"):
            from pycocotools import mask as coco

        mask = np.zeros(self.shape, np.uint8)
        for class_id, runs in self.instances:
            if not isinstance(runs, dict) or isinstance(runs["counts"], list):
                runs = coco.frPyObjects(runs, *self.shape)
            if isinstance(runs, list):  # one item for each polygon
                runs = coco.merge(runs)
            mask[(coco.decode(runs) == 1) & (mask == 0)] = class_id
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
        try:
            content = json.loads(path.read_bytes())
            categories = {int(c["id"]): str(c["name"]) for c in content.get("categories", ())}
            classes = _read_classes(dataset_classes_inclusion_tuples_list, categories)
            images = _read_images(content, [category_id for category_id, _ in classes])
            used = {entry["category_id"] for entry in content["annotations"]}
        except ConfigError:
            raise
        except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"cannot read the annotation file '{path}': {error!r}") from error
        background, name = classes[0]
        if background in used | categories.keys() and categories.get(background, "").lower() != "background":
            raise ConfigError(
                f"category {background} ({name!r}) would have the class of all pixels outside the instances; put an "
                "unused category id with the name 'background' first",
                _SELECTION,
            )
        names = tuple(name for _, name in classes)
        self.metainfo = {"classes": names, "palette": default_palette(len(names)), "ignore_index": None}
        text = f"{path.absolute()} {file_version(path)} {classes} {_MIN_PIXELS}"
        self._version = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
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
        image, mask = read_image(self.image_folder / entry.name, self.max_pixels), entry.mask()
        self.check_sizes(image, self.image_folder / entry.name, mask, f"image {entry.image_id}")
        return image, mask

    def cache_key(self, index: int) -> tuple[str, str]:
        """Return a name (dataset class, image path, image id) and a version (of the image and the annotation file)."""
        entry = self._images[index]
        path = self.image_folder / entry.name
        return self.sample_key([path.absolute(), entry.image_id], f"{file_version(path)}-{self._version}")


def _read_classes(
    selection: Iterable[Sequence[Any]] | Literal["voc"] | None, categories: Mapping[int, str]
) -> list[tuple[int, str]]:
    """Return the category id and the name of each class."""
    pairs: Any = _VOC_CLASSES if selection == "voc" else selection
    if pairs is None:  # class ids are category ids
        names = {0: "background", **categories}
        pairs = [(i, names.get(i, f"unused {i}")) for i in range(max(names) + 1)]
    try:
        classes = [(int(category_id), str(name)) for category_id, name in pairs]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"must be 'voc' or a list of [category id, name]: {error}", _SELECTION) from error
    if not 1 <= len(classes) <= 256 or len(dict(classes)) != len(classes):
        raise ConfigError("must contain 1 to 256 classes with distinct category ids", _SELECTION)
    return classes


def _read_images(content: Mapping[str, Any], categories: list[int]) -> list[_Image]:
    """Return the images in the annotation file, with their instances of these categories."""
    class_ids = {category_id: class_id for class_id, category_id in enumerate(categories)}
    images = {}
    for entry in content["images"]:
        shape = int(entry["height"]), int(entry["width"])
        images[entry["id"]] = _Image(int(entry["id"]), str(entry["file_name"]), shape, [])
    for entry in content["annotations"]:
        image, class_id = images.get(entry["image_id"]), class_ids.get(entry["category_id"])
        if image is None or class_id is None or not entry["segmentation"]:
            continue
        runs = entry["segmentation"]
        if isinstance(runs, dict) and (
            tuple(runs["size"]) != image.shape
            or (isinstance(runs["counts"], list) and sum(runs["counts"]) != image.shape[0] * image.shape[1])
        ):
            raise ValueError(f"the run lengths of annotation {entry.get('id')} do not match its image")
        image.instances.append((class_id, runs))
    return list(images.values())


def _select_images(images: list[_Image], selection_file: Path, path: Path) -> list[_Image]:
    """Return the images that are not excluded; their ids are stored in `selection_file`."""
    try:
        image_ids = set(json.loads(selection_file.read_bytes()))
    except (OSError, ValueError, TypeError):
        print_log(f"selecting images from '{path}': reading the masks of {len(images)} images", "current")
        image_ids = {image.image_id for image in images if np.count_nonzero(image.mask()) > _MIN_PIXELS}
        try:
            selection_file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(selection_file) as temporary:
                temporary.write_text(json.dumps(sorted(image_ids)))
        except OSError as error:
            print_log(f"cannot write '{selection_file}' ({error})", "current", logging.WARNING)
    selected = [image for image in images if image.image_id in image_ids]
    if not selected:
        raise DataError(f"no image in '{path}' has more than {_MIN_PIXELS} labeled pixels")
    return selected
