"""CIFAR-10 (Krizhevsky 2009), read from its binary version."""

from __future__ import annotations

import hashlib
import shutil
import tarfile
import tempfile
import urllib.request
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from slipstream.dataset.loading.sample_index import sample_rng
from slipstream.dataset.sources.base import default_palette
from slipstream.dataset.transforms.image_resize import Resize
from slipstream.dataset.transforms.image_transforms import (
    ImageTransform,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    ToTensor,
    read_transforms,
)
from slipstream.errors import DataError
from slipstream.logging import print_log
from slipstream.registry import DATASETS

__all__ = ["CIFAR10"]

_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"  # the authors publish no other checksum
_FOLDER = "cifar-10-batches-bin"
_TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
_TEST = ("test_batch.bin",)
_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_RECORD = 1 + 3 * 32 * 32  # a label, then the red, green and blue planes


@DATASETS.register_module(name=["CIFAR10", "Cifar10"])
class CIFAR10(Dataset[dict[str, torch.Tensor]]):
    """50,000 training and 10,000 test photographs of 32 x 32 pixels in ten classes.

    A sample is `{"inputs": uint8 (3, 32, 32) RGB, "targets": int64 ()}`. If the transforms contain `ToTensor`, it also
    contains `"finish"`, the parameters of the device transforms (`slipstream.dataset.transforms.device_transforms`).
    Augmentation depends only on the (seed, epoch, index) of a `SampleIndex`. The files are memory-mapped, so all
    processes share them.

    Args:
        root: folder that contains `cifar-10-batches-bin`, or the files of that folder.
        train: whether to use the training images instead of the test images.
        transforms: `RandomCrop`, `RandomHorizontalFlip`, `Resize`, or functions of an image, uint8 (3, H, W), and a
            generator; then `ToTensor` and `Normalize`. Dicts are built with `TRANSFORMS`.
        download: download the files if they are missing (170 MB), and verify their published MD5 checksum.

    Raises:
        DataError: the files are missing, are damaged, or cannot be downloaded.
        ConfigError: the order of the transforms is not supported.
    """

    def __init__(
        self,
        root: str | Path,
        train: bool = True,
        transforms: Sequence[ImageTransform | ToTensor | Normalize | Mapping[str, Any]] = (),
        download: bool = False,
    ) -> None:
        self.transforms, self._device_params = read_transforms(transforms)
        self._paths = _find(Path(root), _TRAIN if train else _TEST, download)
        self._map_files()
        for path, records in zip(self._paths, self._records, strict=True):
            if (label := records[:, 0].max()) >= len(_CLASSES):
                raise DataError(f"'{path}' contains the label {label}; labels must be 0 to 9")
        labels = np.concatenate([records[:, 0] for records in self._records])
        self.targets = torch.from_numpy(labels.astype(np.int64))
        self.metainfo = {"classes": _CLASSES, "palette": default_palette(10), "ignore_index": None}

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"CIFAR10 has samples 0 to {len(self) - 1}, not {int(index)}")
        which = bisect_right(self._starts, index) - 1
        image = self._records[which][int(index) - self._starts[which], 1:].reshape(3, 32, 32)
        if self.transforms:
            rng = sample_rng(index)
            for transform in self.transforms:
                image = transform(image, rng)
        sample = {"inputs": torch.from_numpy(np.array(image, order="C")), "targets": self.targets[int(index)]}
        return sample if self._device_params is None else {**sample, "finish": self._device_params}

    @property
    def draws_nothing_global(self) -> bool:
        """Whether samples do not use the global random generators, so a loader need not seed them."""
        known = (RandomCrop, RandomHorizontalFlip, Resize)
        return type(self) is CIFAR10 and all(type(transform) in known for transform in self.transforms)

    def get_cat_ids(self, index: int) -> list[int]:
        """Return a list that contains the class id of sample `index`."""
        return [int(self.targets[index])]

    def _map_files(self) -> None:
        self._records: list[NDArray[np.uint8]] = [_mapped(path) for path in self._paths]
        lengths = [len(records) for records in self._records]
        self._starts = np.cumsum([0, *lengths[:-1]]).tolist()

    def __getstate__(self) -> dict[str, Any]:
        # Otherwise pickle would copy the mapped files to each spawned worker.
        return {key: value for key, value in self.__dict__.items() if key != "_records"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map_files()


def _mapped(path: Path) -> NDArray[np.uint8]:
    """Return the records of a file, uint8 (N, 3073)."""
    size = path.stat().st_size
    if size == 0 or size % _RECORD:
        raise DataError(
            f"'{path}' is damaged: its size, {size} bytes, is not a positive multiple of {_RECORD}; download it again"
        )
    # Slicing a plain array is several times faster than slicing `np.memmap`.
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r")).reshape(-1, _RECORD)


def _find(root: Path, names: Sequence[str], download: bool) -> list[Path]:
    for folder in (root / _FOLDER, root):
        if all((folder / name).is_file() for name in names):
            return [folder / name for name in names]
    if download:
        _download(root)
        return [root / _FOLDER / name for name in names]
    other = (
        f" The Python version in '{root / 'cifar-10-batches-py'}' is not supported, because unpickling a file can run "
        "arbitrary code."
        if (root / "cifar-10-batches-py").is_dir()
        else ""
    )
    raise DataError(
        f"CIFAR-10 not found: neither '{root}' nor its folder '{_FOLDER}' contains {', '.join(names)}.{other} "
        f"Unpack the binary version there ({_URL}), or pass download=True"
    )


def _download(root: Path) -> None:
    """Download, verify and unpack the archive, then move the complete folder into `root`."""
    root.mkdir(parents=True, exist_ok=True)
    print_log(f"Downloading CIFAR-10 (170 MB) from {_URL} to '{root}'", "current")
    with tempfile.TemporaryDirectory(prefix=f".{_FOLDER}-", dir=root) as temporary:
        archive = Path(temporary) / "archive.tar.gz"
        try:
            with urllib.request.urlopen(_URL, timeout=60) as response, archive.open("wb") as file:
                shutil.copyfileobj(response, file, 1 << 20)
        except OSError as error:
            raise DataError(
                f"cannot download {_URL}: {error}. Download the archive manually and unpack it into '{root}'"
            ) from error
        with archive.open("rb") as file:
            found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        if found != _MD5:
            raise DataError(
                f"the download of {_URL} is damaged: its MD5 is {found}, expected {_MD5}; try again"
            )
        with tarfile.open(archive) as tar:
            tar.extractall(temporary, filter="data")
        if not (root / _FOLDER).is_dir():  # another process may have created it
            (Path(temporary) / _FOLDER).rename(root / _FOLDER)
