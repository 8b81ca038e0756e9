"""A folder of images and a folder of masks, paired by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from slipstream.dataset.base import SegmentationDataset, Transform, default_palette
from slipstream.errors import ConfigError, DataError, did_you_mean
from slipstream.registry import DATASETS

__all__ = ["ImageMaskFolder"]

_LOSSLESS = (".bmp", ".pgm", ".png", ".ppm", ".tif", ".tiff")
# A mask that went through JPEG has label ids that nobody drew, so those extensions must be asked for.
_EXTENSIONS = {"image": (*_LOSSLESS, ".jpeg", ".jpg", ".webp"), "mask": _LOSSLESS}
_MOST_LISTED = 20


@DATASETS.register_module()
class ImageMaskFolder(SegmentationDataset):
    """Images and masks in two folders, with subfolders, paired by their path without the suffix.

    Masks are 8-bit greyscale or palette files whose pixel values are class ids. Samples stand in the
    order of their paths. `image_paths` and `mask_paths` list the files.

    Args:
        data_root: the folder that `images` and `masks` are relative to.
        images: folder of the images, below `data_root`.
        masks: folder of the masks, below `data_root`.
        classes: names of the class ids 0, 1, ...
        ignore_index: the id of pixels that belong to no class, or None where there are none.
        palette: one [r, g, b] a class; PASCAL VOC's colours by default.
        image_suffix: end of the image names, such as `_leftImg8bit.png`: files that end otherwise are no
            images, and the pair's name is what stands before it. By default, any image extension.
        mask_suffix: the same for the masks, such as `_gtFine_labelIds.png`; by default, any lossless one.
        label_map: the class id (or `ignore_index`) for ids in the files; other ids stay as they are.
        transforms: see `SegmentationDataset`.
        cache_in_memory: see `SegmentationDataset`.

    Raises:
        DataError: a folder is missing or has no images, files have no partner; and, when a sample is
            read, a file is corrupt, sizes differ, or a label id is neither a class nor `ignore_index`.
        ConfigError: `palette`, `label_map` or `ignore_index` do not fit the classes.
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
    ) -> None:
        super().__init__(transforms, cache_in_memory)
        self.metainfo = _metainfo(classes, palette, ignore_index)
        self._label_table = _label_table(label_map or {}, len(classes), ignore_index)
        image_files = _files(Path(data_root) / images, image_suffix, "image")
        mask_files = _files(Path(data_root) / masks, mask_suffix, "mask")
        _check_pairs(image_files, mask_files)
        self.image_paths = [image_files[name] for name in sorted(image_files)]
        self.mask_paths = [mask_files[name] for name in sorted(image_files)]

    def __len__(self) -> int:
        return len(self.image_paths)

    def load(self, index: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return image `index` as uint8 (H, W, 3) RGB and its mask as uint8 (H, W)."""
        image, mask = _read_image(self.image_paths[index]), self._read_mask(index)
        if image.shape[:2] != mask.shape:
            raise DataError(
                f"'{self.image_paths[index]}' is {image.shape[1]} x {image.shape[0]} pixels, but its mask "
                f"'{self.mask_paths[index]}' is {mask.shape[1]} x {mask.shape[0]}"
            )
        return image, mask

    def get_cat_ids(self, index: int) -> list[int]:
        """Return the class ids that occur in the mask of sample `index`, sorted, without the ignored id."""
        ids = np.unique(self._read_mask(index)).tolist()
        return [i for i in ids if i != self.metainfo["ignore_index"]]

    def _read_mask(self, index: int) -> np.ndarray[Any, Any]:
        path = self.mask_paths[index]
        image = _decoded(path)
        if image.mode not in ("L", "P"):
            raise DataError(
                f"the mask '{path}' has mode {image.mode}; its pixels must be class ids in one 8-bit channel "
                "(Pillow mode 'L' or 'P'): convert colours to ids once, before training"
            )
        mask = np.asarray(image)
        if self._label_table is not None:
            mask = self._label_table.take(mask)
        self._check_ids(mask, path)
        return mask

    def _check_ids(self, mask: np.ndarray[Any, Any], path: Path) -> None:
        count, ignored = len(self.metainfo["classes"]), self.metainfo["ignore_index"]
        if mask.max() < count:
            return
        wrong = mask >= count if ignored is None else (mask >= count) & (mask != ignored)
        if wrong.any():
            ids, pixels = np.unique(mask[wrong], return_counts=True)
            found = ", ".join(f"{i} ({n} pixels)" for i, n in zip(ids, pixels, strict=True))
            raise DataError(
                f"the mask '{path}' has label ids that are no class: {found}; with {count} classes they must "
                f"be 0 to {count - 1}, or ignore_index={ignored}. Name them in label_map, or correct "
                "classes or ignore_index"
            )


def _metainfo(
    classes: Sequence[str], palette: Sequence[Sequence[int]] | None, ignore_index: int | None
) -> dict[str, Any]:
    if isinstance(classes, str) or not 0 < len(classes) <= 256:
        raise ConfigError(f"classes must be a list of 1 to 256 names, not {classes!r}")
    if ignore_index is not None and not 0 <= ignore_index <= 255:
        raise ConfigError(f"ignore_index must be 0 to 255, as mask pixels are, or None, not {ignore_index}")
    if palette is None:
        palette = default_palette(len(classes))
    if len(palette) != len(classes):
        raise ConfigError(f"palette has {len(palette)} colours for {len(classes)} classes")
    return {
        "classes": tuple(classes),
        "palette": [list(colour) for colour in palette],
        "ignore_index": ignore_index,
    }


def _label_table(
    label_map: Mapping[int, int], classes: int, ignore_index: int | None
) -> np.ndarray[Any, Any] | None:
    """Return the new id of each of the 256 ids that a file can hold, or None if all stay as they are."""
    table = np.arange(256, dtype=np.uint8)
    for old, new in label_map.items():
        if not 0 <= old <= 255 or not (0 <= new < classes or new == ignore_index):
            raise ConfigError(
                f"label_map: {old} -> {new} must lead from a pixel value (0 to 255) to a class id "
                f"(0 to {classes - 1}) or to ignore_index={ignore_index}"
            )
        table[old] = new
    return table if label_map else None


def _files(folder: Path, suffix: str | None, what: str) -> dict[str, Path]:
    """Return the files of `folder` that end in `suffix`, by their path below it without the suffix."""
    _check_folder(folder, what)
    endings = (suffix,) if suffix else _EXTENSIONS[what]
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        if path.name.startswith(".") or not path.name.lower().endswith(tuple(e.lower() for e in endings)):
            continue
        relative = path.relative_to(folder)
        stem = path.name[: -len(suffix)] if suffix else path.stem
        name = (relative.parent / stem).as_posix()
        if name in found:
            raise DataError(f"two {what} files are called '{name}': '{found[name]}' and '{path}'; remove one")
        found[name] = path
    if not found:
        raise DataError(f"no {what} files in '{folder}': no name below it ends in {' or '.join(endings)}")
    return found


def _check_folder(folder: Path, what: str) -> None:
    if folder.is_dir():
        return
    missing = folder
    while not missing.parent.is_dir():
        missing = missing.parent
    hint = did_you_mean(missing.name, [p.name for p in missing.parent.iterdir() if p.is_dir()])
    raise DataError(
        f"the {what} folder '{folder}' does not exist: "
        f"'{missing.parent}' has no folder '{missing.name}'{hint}"
    )


def _check_pairs(images: Mapping[str, Path], masks: Mapping[str, Path]) -> None:
    lonely = [f"image without a mask: '{images[name]}'" for name in sorted(images.keys() - masks.keys())]
    lonely += [f"mask without an image: '{masks[name]}'" for name in sorted(masks.keys() - images.keys())]
    if lonely:
        more = f"\n  ... and {len(lonely) - _MOST_LISTED} more" if len(lonely) > _MOST_LISTED else ""
        raise DataError(
            f"{len(lonely)} files have no partner of the same name (set image_suffix and mask_suffix if the "
            "names differ in how they end):\n  " + "\n  ".join(lonely[:_MOST_LISTED]) + more
        )


def _read_image(path: Path) -> np.ndarray[Any, Any]:
    image = _decoded(path)
    if image.mode[0] in "IF":  # converting these to RGB would clip, not scale
        raise DataError(f"the image '{path}' has mode {image.mode}; convert it to 8 bits a channel")
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def _decoded(path: Path) -> Image.Image:
    try:
        with Image.open(path) as image:
            image.load()
            return image
    except Exception as error:  # Pillow's decoders raise almost anything on broken files
        raise DataError(f"cannot read '{path}': {error}") from error
