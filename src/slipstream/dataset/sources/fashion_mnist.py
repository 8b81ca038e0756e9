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
from slipstream.dataset.sources.base import check_index, class_metainfo, download_data
from slipstream.errors import ConfigError, DataError
from slipstream.files import atomic_write
from slipstream.registry import DATASETS

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
_FILES = {"train": list(_MD5)[:2], "test": list(_MD5)[2:]}
_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
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
        self.metainfo = class_metainfo(_CLASSES)
        shape = (len(self.targets), 1, 28, 28)
        if self.images.shape != shape or not len(self) or int(self.targets.max()) >= len(_CLASSES):
            raise DataError(f"'{images}' and '{labels}' are not files of Fashion-MNIST; download them again")

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        check_index(self, index)
        image, target = self.images[int(index)], self.targets[int(index)]
        return {"inputs": _augment(image, sample_rng(index)) if self.augment else image, "targets": target}

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
        found = [[p for p in (folder / n, folder / f"{n}.gz") if p.is_file()] for n in names]
        if all(found):
            return [paths[0] for paths in found]
    if not download or data_root is None:
        raise DataError(
            f"Fashion-MNIST not found: {' or '.join(map(repr, map(str, folders)))} must contain {' and '.join(names)}, "
            "with or without .gz. Run 'apt-get install dataset-fashion-mnist', or pass data_root and download=True"
        )
    folders[0].mkdir(parents=True, exist_ok=True)
    remedy = f"Download the file to '{data_root}', or run 'apt-get install dataset-fashion-mnist'"
    paths = [folders[0] / f"{name}.gz" for name in names]
    for name, path in zip(names, paths, strict=True):
        with atomic_write(path) as temporary:
            download_data(f"{_URL}{name}.gz", temporary, _MD5[name], remedy)
    return paths


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
    start = 4 + 4 * ndim
    shape = [int.from_bytes(data[at : at + 4], "big") for at in range(4, start, 4)]
    if data[:4] != bytes([0, 0, 8, ndim]) or len(data) - start != math.prod(shape):
        raise DataError(f"'{path}' is damaged, or not an IDX file of unsigned bytes; download it again")
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape).copy())
