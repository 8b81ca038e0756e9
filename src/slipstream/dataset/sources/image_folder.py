"""Datasets of image and mask files, and functions that find these files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
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
    default_palette,
    file_version,
    segmentation_metainfo,
)
from slipstream.dataset.sources.decode import MAX_PIXELS, read_image, read_mask
from slipstream.dataset.transforms.crop import Sample
from slipstream.dataset.transforms.image_transforms import ImageTransforms
from slipstream.errors import ConfigError, DataError, did_you_mean
from slipstream.registry import DATASETS

_CLASS_LAYOUT = "The expected layout is root/CLASS/IMAGE, with one folder for each class"
_LOSSLESS = (".bmp", ".pgm", ".png", ".ppm", ".tif", ".tiff")
# Lossy compression changes label ids, so masks in lossy formats require an explicit suffix.
_EXTENSIONS = {"image": (*_LOSSLESS, ".jpeg", ".jpg", ".webp"), "mask": _LOSSLESS}
_REMEDY = "Fix the file (`slipstream data stats RECIPE` lists broken files), or set skip_errors"
_MAX_LISTED_FILES = 100


class ImageMaskPairs(SegmentationDataset):
    """Base class for datasets that read each sample from two files. Subclasses may define `mask_table`.

    Args:
        pairs: the image file and the mask file of each sample.
        metainfo: see `SegmentationDataset`.
        transforms, cache_in_memory, cache: see `SegmentationDataset`.
        max_pixels: maximum number of pixels per file; None for no limit.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[Path, Path]],
        metainfo: dict[str, Any],
        transforms: Sequence[Transform | Mapping[str, Any]] = (),
        cache_in_memory: bool = False,
        cache: str | Path | None = None,
        max_pixels: int | None = MAX_PIXELS,
    ) -> None:
        super().__init__(transforms, cache_in_memory, cache)
        self.metainfo = metainfo
        self.max_pixels = max_pixels
        self.image_paths = [image for image, _ in pairs]
        self.mask_paths = [mask for _, mask in pairs]

    def __len__(self) -> int:
        return len(self.image_paths)

    @property
    def samples_targets_tuples_list(self) -> list[tuple[str, str]]:
        """The paths of the image and the mask of each sample. SuperGradients uses the same name."""
        pairs = zip(self.image_paths, self.mask_paths, strict=True)
        return [(str(image), str(mask)) for image, mask in pairs]

    def mask_table(self, path: Path) -> NDArray[np.uint8] | None:
        """Return the class id for each of the 256 pixel values in a mask file, or None if they are class ids."""
        return None

    def load(self, index: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return image `index` as uint8 (H, W, 3) RGB and its mask as uint8 (H, W)."""
        image, mask = self.load_image(index), self.load_mask(index)
        self.check_sizes(image, self.image_paths[index], mask, self.mask_paths[index])
        return image, mask

    def load_image(self, index: int) -> NDArray[np.uint8]:
        """Return image `index` as uint8 (H, W, 3) RGB."""
        return read_image(self.image_paths[index], self.max_pixels)

    def load_mask(self, index: int) -> NDArray[np.uint8]:
        """Return the mask of sample `index` as uint8 (H, W)."""
        path = self.mask_paths[index]
        values, table = read_mask(path, self.max_pixels), self.mask_table(path)
        mask = values
        if table is not None:  # `translate` is several times faster than NumPy indexing
            mask = np.frombuffer(bytearray(values).translate(table.data), np.uint8).reshape(values.shape)
        self.check_mask(mask, values, path)
        return mask

    def get_cat_ids(self, index: int) -> list[int]:
        """Return the sorted class ids in the mask of sample `index`, excluding the ignored id."""
        ids: list[int] = np.unique(self.load_mask(index)).tolist()
        return [i for i in ids if i != self.metainfo["ignore_index"]]

    def cache_key(self, index: int) -> tuple[str, str]:
        """Return a name (dataset class and paths) and a version (of the files, the class ids and their mapping)."""
        files = (self.image_paths[index].absolute(), self.mask_paths[index].absolute())
        table = self.mask_table(files[1])
        return self.sample_key(files, file_version(*files), b"" if table is None else table.tobytes())

    def _loaded(self, index: int) -> Sample:
        try:
            return super()._loaded(index)
        except DataError as error:
            raise DataError(f"{error}. {_REMEDY}") from error


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
        max_pixels: int | None = MAX_PIXELS,
    ) -> None:
        metainfo = segmentation_metainfo(classes, palette, ignore_index)
        table = np.arange(256, dtype=np.uint8)
        for old, new in (label_map or {}).items():
            if not 0 <= old <= 255 or not (0 <= new < len(classes) or new == ignore_index):
                raise ConfigError(f"{old} -> {new} must map 0..255 to a class id", "label_map")
            table[old] = new
        self._table = table if label_map else None
        root = Path(data_root)
        pairs = pair_files(
            files_by_name(root / images, image_suffix, "image"),
            files_by_name(root / masks, mask_suffix, "mask"),
        )
        super().__init__(pairs, metainfo, transforms, cache_in_memory, cache, max_pixels)

    def mask_table(self, path: Path) -> NDArray[np.uint8] | None:
        """Return the class id for each pixel value, which is the same for all mask files."""
        return self._table


@DATASETS.register_module()
class SuperviselyPersonsDataset(ImageMaskPairs):
    """Images of people, with masks whose pixels are 0 (background) or 1 (person).

    Args:
        root_dir: root folder of the dataset.
        list_file: CSV file with the paths of an image and its mask in each row; see `read_pair_list`.
        transforms, cache: see `SegmentationDataset`.
        cache_labels, cache_images: if either is True, keep each image and its mask in memory after the first read.
        max_pixels: see `ImageMaskFolder`.
    """

    def __init__(
        self,
        root_dir: str | Path,
        list_file: str,
        transforms: Sequence[Transform | Mapping[str, Any]] = (),
        cache_labels: bool = False,
        cache_images: bool = False,
        cache: str | Path | None = None,
        max_pixels: int | None = MAX_PIXELS,
    ) -> None:
        metainfo = {"classes": ("background", "person"), "palette": default_palette(2), "ignore_index": None}
        pairs = read_pair_list(Path(root_dir), list_file, separator=",")
        super().__init__(pairs, metainfo, transforms, cache_labels or cache_images, cache, max_pixels)


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
            `CenterCrop`, `RandomCrop`, or functions that take an image, uint8 (3, H, W), and optionally a generator;
            followed by `ToTensor` and `Normalize`. Dicts are built with `TRANSFORMS`. Transforms of Albumentations
            and torchvision, which may also normalize the image, are supported, too.
        max_pixels: maximum number of pixels in a file; None for no limit.

    Raises:
        DataError: the folder is missing or contains no images, or an image is not in a class folder; or, when a sample
            is read, a file is corrupt.
        ConfigError: the order of the transforms is not supported.
    """

    def __init__(
        self, root: str | Path, transforms: ImageTransforms = (), max_pixels: int | None = MAX_PIXELS
    ) -> None:
        super().__init__(transforms)
        self.max_pixels = max_pixels
        files = files_by_name(Path(root), None, "image").values()
        names = [path.relative_to(root).parts for path in files]
        if unclassified := [path for path, parts in zip(files, names, strict=True) if len(parts) < 2]:
            raise DataError(f"'{unclassified[0]}' is not in a class folder. {_CLASS_LAYOUT}")
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


def files_by_name(folder: Path, suffix: str | None, kind: str) -> dict[str, Path]:
    """Return the files whose names end with `suffix` in `folder` and its subfolders, sorted by path.

    The keys are relative paths without the suffix. Symbolic links to folders are followed; hidden files and folders are
    skipped. If `suffix` is None, `kind` ("image" or "mask") determines the extensions.

    Raises:
        DataError: the folder is missing or cannot be read, contains no matching files, or contains two files with the
            same name.
    """
    check_folder(folder, kind)
    suffixes = (suffix,) if suffix else _EXTENSIONS[kind]
    found: dict[str, Path] = {}
    for path in sorted(_walk_files(folder)):
        if not path.name.lower().endswith(tuple(e.lower() for e in suffixes)):
            continue
        stem = path.name[: -len(suffix)] if suffix else path.stem
        name = (path.relative_to(folder).parent / stem).as_posix()
        if name in found:
            raise DataError(f"two {kind} files have the name '{name}': '{found[name]}' and '{path}'")
        found[name] = path
    if not found:
        raise DataError(f"no {kind} files in '{folder}': no file name ends with {' or '.join(suffixes)}")
    return found


def _walk_files(folder: Path, parents: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """Yield the files in `folder` and its subfolders, skipping symbolic links to the folders in `parents`."""
    resolved = folder.resolve()
    if resolved in parents:
        return
    try:
        with os.scandir(folder) as entries:
            found = [(entry.is_dir(), folder / entry.name) for entry in entries if entry.name[0] != "."]
    except OSError as error:
        raise DataError(f"cannot read '{error.filename or folder}': {error.strerror}") from error
    for is_folder, path in found:
        yield from _walk_files(path, parents | {resolved}) if is_folder else (path,)


def check_folder(folder: Path, kind: str) -> None:
    """Raise a DataError if `folder` does not exist. The message suggests a similar folder name."""
    if folder.is_dir():
        return
    missing = next(path for path in (folder, *folder.parents) if path.parent.is_dir())
    hint = did_you_mean(missing.name, [p.name for p in missing.parent.iterdir() if p.is_dir()])
    raise DataError(
        f"the {kind} folder '{folder}' does not exist; set data_root (in SuperGradients' recipes, data_root_dir) "
        f"to the dataset's folder. '{missing.parent}' has no folder '{missing.name}'{hint}"
    )


def pair_files(images: Mapping[str, Path], masks: Mapping[str, Path]) -> list[tuple[Path, Path]]:
    """Return the images and masks with the same names, sorted by name.

    Raises:
        DataError: an image has no mask, or a mask no image.
    """
    unpaired = [f"image without a mask: '{images[name]}'" for name in sorted(images.keys() - masks.keys())]
    unpaired += [f"mask without an image: '{masks[name]}'" for name in sorted(masks.keys() - images.keys())]
    if unpaired:
        raise DataError(
            f"{len(unpaired)} files have no counterpart with the same name; remove them, or correct the suffixes of "
            "the names:\n  " + "\n  ".join(unpaired)
        )
    return [(images[name], masks[name]) for name in sorted(images)]


def read_pair_list(root: Path, list_file: str, separator: str | None = None) -> list[tuple[Path, Path]]:
    """Return the image and the mask that each line of a text file names.

    Args:
        root: folder that all paths, including `list_file`, are relative to.
        list_file: the text file.
        separator: the text between the two paths; by default, white space.

    Raises:
        DataError: the list or a listed file is missing, or a line does not contain two paths.
    """
    path = root / list_file
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the list of samples '{path}': {error}") from error
    rows = [[word.strip() for word in line.split(separator)] for line in lines if line.strip()]
    if wrong := [row for row in rows if len(row) < 2 or (separator is None and len(row) > 2)]:
        raise DataError(f"'{path}' must contain two paths on each line, not {wrong[0]}")
    pairs = [(root / row[0], root / row[1]) for row in rows]
    if missing := [str(file) for pair in pairs for file in pair if not file.is_file()]:
        listed = "\n  ".join(missing[:_MAX_LISTED_FILES])
        raise DataError(f"files listed in '{path}' do not exist ({len(missing)}):\n  {listed}")
    if not pairs:
        raise DataError(f"the list of samples '{path}' is empty")
    return pairs
