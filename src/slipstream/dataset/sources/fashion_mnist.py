"""Fashion-MNIST (Xiao et al. 2017, arXiv 1708.07747), read from its IDX files."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from slipstream.dataset.loading.generators import sample_rng
from slipstream.dataset.sources.base import default_palette
from slipstream.dataset.sources.download import download_data
from slipstream.errors import ConfigError, DataError
from slipstream.files import atomic_write
from slipstream.registry import DATASETS

__all__ = ["FashionMNIST"]

# Installation folder of the Debian package dataset-fashion-mnist.
_SYSTEM_FOLDER = Path("/usr/share/datasets/fashion-mnist")
_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
# The authors publish only MD5 checksums of the compressed files.
_MD5 = {
    "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
}
_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
_PAD = 2
_MAX_FILE_SIZE = 16 + 60_000 * 28 * 28


@DATASETS.register_module()
class FashionMNIST(Dataset[dict[str, torch.Tensor]]):
    """60,000 training and 10,000 test images of clothing in ten classes.

    A sample is `{"inputs": uint8 (1, 28, 28), "targets": int64 ()}`. The `images` attribute, uint8 (N, 1, 28, 28),
    and the `targets` attribute, int64 (N,), contain the whole split. Without augmentation, samples are views of
    these tensors.

    Args:
        data_root: folder that contains the IDX files, optionally gzipped; by default, the folder of the Debian package
            `dataset-fashion-mnist`.
        split: 'train' or 'test'.
        download: if `data_root` does not contain the files, use the files from the Debian package; if the package is
            not installed, download the files to `data_root` and verify their MD5 checksums.
        augment: shift each image by up to 2 pixels (pad by 2, then crop at a random position), and mirror it with
            probability 1/2. The result depends only on the sample's (seed, epoch, index).

    Raises:
        DataError: the files are missing, are damaged, or cannot be downloaded.
    """

    def __init__(
        self,
        data_root: str | Path | None = None,
        split: Literal["train", "test"] = "train",
        download: bool = False,
        augment: bool = False,
    ) -> None:
        if split not in _FILES:
            raise ConfigError(f"split must be 'train' or 'test', got {split!r}")
        images, labels = _find(data_root, _FILES[split], download)
        self.images = _read_idx(images, ndim=3).unsqueeze(1)
        self.targets = _read_idx(labels, ndim=1).long()
        self.augment = augment
        self.metainfo = {"classes": _CLASSES, "palette": default_palette(10), "ignore_index": None}
        _check(self.images, self.targets, images, labels)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(
                f"sample index {int(index)} is out of range for FashionMNIST; use 0 to {len(self) - 1}"
            )
        image = self.images[int(index)]
        return {
            "inputs": _augment(image, sample_rng(index)) if self.augment else image,
            "targets": self.targets[int(index)],
        }

    @property
    def independent_of_global_rng(self) -> bool:
        """Whether reading a sample never uses the global random generators. If True, the loader does not seed them."""
        return type(self) is FashionMNIST

    def get_cat_ids(self, index: int) -> list[int]:
        """Return a list that contains the class id of sample `index`."""
        return [int(self.targets[index])]


def _augment(image: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    offsets = 2 * _PAD + 1
    mirrored, position = divmod(int(rng.integers(2 * offsets * offsets)), offsets * offsets)
    top, left = divmod(position, offsets)
    height, width = image.shape[1:]
    padded = torch.nn.functional.pad(image, (_PAD,) * 4)
    crop = padded[:, top : top + height, left : left + width]
    return crop.flip(2) if mirrored else crop


def _find(data_root: str | Path | None, names: Sequence[str], download: bool) -> list[Path]:
    """Return the paths of the files in the first folder that contains all of them.

    If no folder contains them and `download` is True, download the files to `data_root`.
    """
    folders = [Path(data_root)] if data_root is not None else []
    if data_root is None or download:
        folders.append(_SYSTEM_FOLDER)
    for folder in folders:
        found = [p for n in names for p in (folder / n, folder / f"{n}.gz") if p.is_file()]
        if len({p.name.removesuffix(".gz") for p in found}) == len(names):
            return [next(p for p in found if p.name.startswith(n)) for n in names]
    if download and data_root is not None:
        return [_download(name, Path(data_root)) for name in names]
    raise DataError(
        f"Fashion-MNIST not found: {' or '.join(map(repr, map(str, folders)))} must contain "
        f"{' and '.join(names)}, with or without .gz. Run 'apt-get install dataset-fashion-mnist', set data_root to "
        "the folder that contains the files, or pass data_root and download=True"
    )


def _download(name: str, folder: Path) -> Path:
    url = f"{_URL}{name}.gz"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.gz"
    remedy = f"Download the file manually to '{folder}', or run 'apt-get install dataset-fashion-mnist'"
    with atomic_write(path) as temporary:
        download_data(url, temporary, _MD5[name], remedy)
    return path


def _read_idx(path: Path, ndim: int) -> torch.Tensor:
    """Return the array of unsigned bytes in an IDX file, as uint8 with `ndim` dimensions.

    The file contains two zero bytes, the byte 8 (the type code of unsigned bytes), the number of dimensions as a byte,
    each dimension as a big-endian 32-bit integer, and the values in row-major order.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(_MAX_FILE_SIZE + 1)  # a small .gz file can expand to any size
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read '{path}': {error}; download it again") from error
    if len(data) > _MAX_FILE_SIZE:
        raise DataError(
            f"'{path}' is larger than the largest Fashion-MNIST file ({_MAX_FILE_SIZE:,} bytes); download it again"
        )
    start = 4 + 4 * ndim
    if data[:4] != bytes([0, 0, 8, ndim]) or len(data) < start:
        raise DataError(
            f"'{path}' is not an IDX file of unsigned bytes in {ndim} dimensions: it starts with {data[:4]!r}; "
            "download it again"
        )
    shape = np.frombuffer(data, dtype=">u4", count=ndim, offset=4).tolist()
    if len(data) - start != math.prod(shape):
        raise DataError(
            f"'{path}' is damaged: its header declares {' x '.join(map(str, shape))} values, but the file "
            f"contains {len(data) - start}; download it again"
        )
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape).copy())


def _check(images: torch.Tensor, targets: torch.Tensor, image_file: Path, label_file: Path) -> None:
    if tuple(images.shape[1:]) != (1, 28, 28) or len(images) == 0:
        raise DataError(
            f"'{image_file}' must contain images of 28 x 28 pixels; its shape is {tuple(images[:, 0].shape)}"
        )
    if len(images) != len(targets):
        raise DataError(
            f"'{image_file}' has {len(images)} images, but '{label_file}' has {len(targets)} labels; "
            "download both again"
        )
    if int(targets.max()) >= len(_CLASSES):
        raise DataError(
            f"'{label_file}' contains the label {int(targets.max())}, but labels must be from 0 to 9; "
            "download it again"
        )
