"""CIFAR-10 (Krizhevsky 2009), from the binary version of its files."""

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
_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"  # the authors publish no other sum
_FOLDER = "cifar-10-batches-bin"
_TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
_TEST = ("test_batch.bin",)
_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_RECORD = 1 + 3 * 32 * 32  # a label, then the red, green and blue plane


@DATASETS.register_module(name=["CIFAR10", "Cifar10"])
class CIFAR10(Dataset[dict[str, torch.Tensor]]):
    """50,000 training and 10,000 test photographs of 32 x 32 pixels in ten classes.

    `dataset[i]` is `{"inputs": uint8 (3, 32, 32) RGB, "targets": int64 ()}` and, if the transforms hold `ToTensor`,
    `"finish"`, the parameters of the device transforms (`slipstream.dataset.transforms.device_transforms`).
    Augmentation depends only on the (seed, epoch, index) of a `SampleIndex`. The files are mapped into memory, so that
    all processes share them.

    Args:
        root: the folder with `cifar-10-batches-bin`, or with that folder's files.
        train: the training images, or else the test images.
        transforms: `RandomCrop`, `RandomHorizontalFlip`, functions of an image, uint8 (3, H, W), and a generator;
            then `ToTensor` and `Normalize`; as objects or as dicts that TRANSFORMS builds.
        download: fetch the files if they are not there (170 MB), and check their published MD5 sum.

    Raises:
        DataError: the files are not there, are damaged, or cannot be fetched.
        ConfigError: the transforms stand in an order that cannot be.
    """

    def __init__(
        self,
        root: str | Path,
        train: bool = True,
        transforms: Sequence[ImageTransform | ToTensor | Normalize | Mapping[str, Any]] = (),
        download: bool = False,
    ) -> None:
        self.transforms, self._finish = read_transforms(transforms)
        self._paths = _find(Path(root), _TRAIN if train else _TEST, download)
        self._map_files()
        for path, records in zip(self._paths, self._records, strict=True):
            if (label := records[:, 0].max()) >= len(_CLASSES):
                raise DataError(f"'{path}' has the label {label}; the classes are 0 to 9")
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
        return sample if self._finish is None else {**sample, "finish": self._finish}

    @property
    def draws_nothing_global(self) -> bool:
        """Whether samples use no global random generator, so that a loader need not seed them."""
        own = (RandomCrop, RandomHorizontalFlip)
        return type(self) is CIFAR10 and all(type(transform) in own for transform in self.transforms)

    def get_cat_ids(self, index: int) -> list[int]:
        """Return the class id of sample `index`, as a list of one."""
        return [int(self.targets[index])]

    def _map_files(self) -> None:
        self._records: list[NDArray[np.uint8]] = [_mapped(path) for path in self._paths]
        lengths = [len(records) for records in self._records]
        self._starts = np.cumsum([0, *lengths[:-1]]).tolist()

    def __getstate__(self) -> dict[str, Any]:
        # A mapped file would be copied whole to a worker that is spawned.
        return {key: value for key, value in self.__dict__.items() if key != "_records"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map_files()


def _mapped(path: Path) -> NDArray[np.uint8]:
    """Return the records of a file, uint8 (N, 3073)."""
    size = path.stat().st_size
    if size == 0 or size % _RECORD:
        raise DataError(
            f"'{path}' is damaged: its {size} bytes are no whole number of records of {_RECORD} bytes; fetch it again"
        )
    # A plain array over the map: `np.memmap`'s own slicing is several times slower.
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r")).reshape(-1, _RECORD)


def _find(root: Path, names: Sequence[str], download: bool) -> list[Path]:
    for folder in (root / _FOLDER, root):
        if all((folder / name).is_file() for name in names):
            return [folder / name for name in names]
    if download:
        _fetch(root)
        return [root / _FOLDER / name for name in names]
    other = (
        f" There is '{root / 'cifar-10-batches-py'}', the Python version, which is not read: unpickling a file "
        "runs whatever code it holds."
        if (root / "cifar-10-batches-py").is_dir()
        else ""
    )
    raise DataError(
        f"no CIFAR-10 in '{root}': looked for {', '.join(names)} there and in '{_FOLDER}'.{other} "
        f"Unpack the binary version there ({_URL}), or pass download=True"
    )


def _fetch(root: Path) -> None:
    """Fetch the archive, check it, and unpack it below `root`, so that the folder is there whole or not at all."""
    root.mkdir(parents=True, exist_ok=True)
    print_log(f"fetching CIFAR-10 (170 MB) from {_URL} into '{root}'", "current")
    with tempfile.TemporaryDirectory(prefix=f".{_FOLDER}-", dir=root) as temporary:
        archive = Path(temporary) / "archive.tar.gz"
        try:
            with urllib.request.urlopen(_URL, timeout=60) as response, archive.open("wb") as file:
                shutil.copyfileobj(response, file, 1 << 20)
        except OSError as error:
            raise DataError(
                f"cannot fetch {_URL}: {error}. Unpack the archive into '{root}' by other means"
            ) from error
        with archive.open("rb") as file:
            found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        if found != _MD5:
            raise DataError(f"{_URL} arrived damaged: its MD5 is {found}, not {_MD5}; try again")
        with tarfile.open(archive) as tar:
            tar.extractall(temporary, filter="data")
        if not (root / _FOLDER).is_dir():  # another process may have been faster
            (Path(temporary) / _FOLDER).rename(root / _FOLDER)
