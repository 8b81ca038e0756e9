"""Base class for datasets of image and mask files, and functions that find and check these files."""

from __future__ import annotations

import hashlib
import logging
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.cores import cores
from slipstream.dataset.sources.base import SegmentationDataset, Transform
from slipstream.dataset.sources.decode import MAX_PIXELS, check_readable, read_image, read_mask
from slipstream.dataset.transforms.crop import Sample
from slipstream.errors import DataError, did_you_mean
from slipstream.logging import print_log

__all__ = ["ImageMaskPairs", "MaskIds", "check_folder", "check_pairs", "files_by_name", "with_remedy"]

_LOSSLESS = (".bmp", ".pgm", ".png", ".ppm", ".tif", ".tiff")
# Lossy compression changes label ids, so masks in lossy formats require an explicit suffix.
_EXTENSIONS = {"image": (*_LOSSLESS, ".jpeg", ".jpg", ".webp"), "mask": _LOSSLESS}


_REMEDY = "Fix or replace the file (`slipstream data stats RECIPE` lists every broken file)"
_SKIP_HINT = ", or set skip_corrupt=True in the dataset to skip unreadable files"


@dataclass(frozen=True)
class MaskIds:
    """Mapping from the pixel values in a mask file to class ids.

    Attributes:
        table: class id for each of the 256 pixel values, uint8 (256,), or None if pixel values are class ids. After
            the mapping, a mask may contain only class ids and the ignored id.
        expected: description of the valid pixel values, for error messages.
    """

    table: NDArray[np.uint8] | None
    expected: str


class ImageMaskPairs(SegmentationDataset):
    """Base class for datasets that read each sample from two files. Subclasses define `mask_ids`.

    Args:
        pairs: the image file and the mask file of each sample.
        metainfo: see `SegmentationDataset`.
        transforms, cache_in_memory, cache: see `SegmentationDataset`.
        skip_corrupt: read every file once at construction, and skip samples with unreadable files. A warning is
            logged for each unreadable file. If False, an unreadable sample raises an error when it is accessed.
        max_pixels: maximum number of pixels per file; None for no limit.

    Raises:
        DataError: none of the samples can be read.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[Path, Path]],
        metainfo: dict[str, Any],
        transforms: Sequence[Transform | Mapping[str, Any]] = (),
        cache_in_memory: bool = False,
        cache: str | Path | None = None,
        skip_corrupt: bool = False,
        max_pixels: int | None = MAX_PIXELS,
    ) -> None:
        super().__init__(transforms, cache_in_memory, cache)
        self.metainfo = metainfo
        self.max_pixels = max_pixels
        if skip_corrupt:
            pairs = _readable_pairs(pairs, max_pixels)
        self.image_paths = [image for image, _ in pairs]
        self.mask_paths = [mask for _, mask in pairs]

    def __len__(self) -> int:
        return len(self.image_paths)

    @property
    def samples_targets_tuples_list(self) -> list[tuple[str, str]]:
        """The paths of the image and the mask of each sample. SuperGradients uses the same name."""
        return [
            (str(image), str(mask)) for image, mask in zip(self.image_paths, self.mask_paths, strict=True)
        ]

    @abstractmethod
    def mask_ids(self, path: Path) -> MaskIds:
        """Return the mapping from pixel values to class ids for the mask file `path`."""

    def load(self, index: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return image `index` as uint8 (H, W, 3) RGB and its mask as uint8 (H, W)."""
        image, mask = self.load_image(index), self.load_mask(index)
        if image.shape[:2] != mask.shape:
            raise DataError(
                f"'{self.image_paths[index]}' is {image.shape[1]} x {image.shape[0]} pixels, but its mask "
                f"'{self.mask_paths[index]}' is {mask.shape[1]} x {mask.shape[0]} (after applying the EXIF orientation)"
            )
        return image, mask

    def load_image(self, index: int) -> NDArray[np.uint8]:
        """Return image `index` as uint8 (H, W, 3) RGB."""
        return read_image(self.image_paths[index], self.max_pixels)

    def load_mask(self, index: int) -> NDArray[np.uint8]:
        """Return the mask of sample `index` as uint8 (H, W)."""
        path = self.mask_paths[index]
        values, ids = read_mask(path, self.max_pixels), self.mask_ids(path)
        mask = values
        if ids.table is not None:  # `translate` is several times faster than NumPy indexing
            mask = np.frombuffer(bytearray(values).translate(ids.table.data), np.uint8).reshape(values.shape)
        invalid = self._invalid_pixels(mask)
        if invalid is not None:
            ids_found, pixels = np.unique(values[invalid], return_counts=True)
            listed = ", ".join(f"{i} ({n} pixels)" for i, n in zip(ids_found, pixels, strict=True))
            raise DataError(f"the mask '{path}' has invalid label ids: {listed}; {ids.expected}")
        return mask

    def get_cat_ids(self, index: int) -> list[int]:
        """Return the sorted class ids in the mask of sample `index`, excluding the ignored id."""
        ids: list[int] = np.unique(self.load_mask(index)).tolist()
        return [i for i in ids if i != self.metainfo["ignore_index"]]

    def cache_key(self, index: int) -> tuple[str, str]:
        """Return a name and a version.

        The name contains the dataset class and the paths; the version depends on the file sizes, the modification
        times, the number of classes, `ignore_index` and the id mapping.
        """
        files = (self.image_paths[index], self.mask_paths[index])
        try:
            stats = [path.stat() for path in files]
        except OSError as error:
            raise DataError(f"cannot read '{error.filename}': {error.strerror}") from error
        table = self.mask_ids(files[1]).table
        # `oriented` invalidates cached files from versions that did not apply the EXIF orientation.
        meaning = f"oriented {len(self.metainfo['classes'])} {self.metainfo['ignore_index']} ".encode()
        digest = hashlib.blake2b(meaning + (b"" if table is None else table.tobytes()), digest_size=8)
        version = "-".join(f"{s.st_size}-{s.st_mtime_ns}" for s in stats)
        dataset_class = (
            f"{type(self).__module__}.{type(self).__qualname__}"  # a subclass may decode differently
        )
        return "\n".join(
            [dataset_class, *(str(path.absolute()) for path in files)]
        ), f"{version}-{digest.hexdigest()}"

    def _loaded(self, index: int) -> Sample:
        try:
            return super()._loaded(index)
        except DataError as error:
            unreadable = _faults((self.image_paths[index], self.mask_paths[index]), self.max_pixels)
            raise with_remedy(error, _REMEDY + _SKIP_HINT if unreadable else _REMEDY) from error

    def _invalid_pixels(self, mask: NDArray[np.uint8]) -> NDArray[np.bool_] | None:
        """Return a mask of the pixels that have neither a class id nor the ignored id, or None if all ids are valid."""
        count, ignored = len(self.metainfo["classes"]), self.metainfo["ignore_index"]
        if mask.max() < count + (ignored == count):
            return None
        invalid: NDArray[np.bool_] = mask >= count
        if ignored is not None:
            invalid &= mask != ignored
        return invalid if invalid.any() else None


def files_by_name(folder: Path, suffix: str | None, kind: str) -> dict[str, Path]:
    """Return the files whose names end with `suffix` in `folder` and its subfolders.

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
            raise DataError(
                f"two {kind} files have the name '{name}': '{found[name]}' and '{path}'; remove one of them"
            )
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
        if is_folder:
            yield from _walk_files(path, parents | {resolved})
        else:
            yield path


def check_folder(folder: Path, kind: str) -> None:
    """Raise a DataError if `folder` does not exist. The message suggests a similar folder name."""
    if folder.is_dir():
        return
    missing = folder
    while not missing.parent.is_dir():
        missing = missing.parent
    hint = did_you_mean(missing.name, [p.name for p in missing.parent.iterdir() if p.is_dir()])
    raise DataError(
        f"the {kind} folder '{folder}' does not exist: "
        f"'{missing.parent}' has no folder '{missing.name}'{hint}"
    )


def with_remedy(error: DataError, remedy: str) -> DataError:
    """Return a DataError with the message of `error`, followed by the remedy."""
    text = str(error)
    return DataError(f"{text}{'' if text.endswith('?') else '.'} {remedy}")


def check_pairs(images: Mapping[str, Path], masks: Mapping[str, Path], remedy: str) -> None:
    """Raise a DataError that lists all images without a mask and all masks without an image, if there are any."""
    unpaired = [f"image without a mask: '{images[name]}'" for name in sorted(images.keys() - masks.keys())]
    unpaired += [f"mask without an image: '{masks[name]}'" for name in sorted(masks.keys() - images.keys())]
    if unpaired:
        count = "1 file has" if len(unpaired) == 1 else f"{len(unpaired)} files have"
        raise DataError(
            f"{count} no counterpart with the same name ({remedy}; "
            "`slipstream data stats RECIPE` lists such files in all splits):\n  " + "\n  ".join(unpaired)
        )


def _readable_pairs(pairs: Sequence[tuple[Path, Path]], max_pixels: int | None) -> list[tuple[Path, Path]]:
    # Threads are sufficient, because the image decoders release the GIL.
    with ThreadPoolExecutor(cores()) as pool:
        faults = list(pool.map(partial(_faults, max_pixels=max_pixels), pairs))
    for fault in (fault for found in faults for fault in found):
        print_log(f"skip_corrupt: skipping a sample: {fault}", "current", logging.WARNING)
    readable = [pair for pair, found in zip(pairs, faults, strict=True) if not found]
    if not readable:
        raise DataError(f"none of the {len(pairs)} samples can be read; first error: {faults[0][0]}")
    return readable


def _faults(pair: tuple[Path, Path], max_pixels: int | None) -> list[str]:
    faults = []
    for path in pair:
        try:
            check_readable(path, max_pixels)
        except DataError as error:
            faults.append(str(error))
    return faults
