"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), read from their binary versions."""

from __future__ import annotations

import tarfile
import tempfile
from bisect import bisect_right
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from slipstream.dataset.sources.base import ImageDataset, class_metainfo, download_data
from slipstream.dataset.transforms.image_transforms import ImageTransforms
from slipstream.errors import DataError
from slipstream.logging import print_log
from slipstream.registry import DATASETS

_PIXELS = 3 * 32 * 32  # size of the red, green and blue planes, which follow the labels in a record


class _Cifar(ImageDataset):
    """Photographs of 32 x 32 pixels, each with a class id.

    A sample is `{"inputs": uint8 (3, 32, 32) RGB, "targets": int64 ()}`. The files are memory-mapped, so all processes
    share them.

    Args:
        root: folder that contains either the archive's folder or the files in that folder.
        train: whether to use the training images instead of the test images.
        transforms: `RandomCrop`, `RandomHorizontalFlip`, `Resize`, or functions that take an image,
            uint8 (3, H, W), and a generator; followed by `ToTensor` and `Normalize`. Dicts are built with `TRANSFORMS`.
        download: if the files are missing, download the archive (170 MB) and verify its published MD5 checksum.

    Raises:
        DataError: the files are missing, are damaged, or cannot be downloaded.
        ConfigError: the order of the transforms is not supported.
    """

    _name: ClassVar[str]
    # Name of the published archive.
    _file: ClassVar[str]
    # MD5 checksum of the archive, the only checksum that the authors publish.
    _md5: ClassVar[str]
    # Folder inside the archive.
    _folder: ClassVar[str]
    # Files of the test images and of the training images.
    _files: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]]
    # Number of one-byte labels before the pixels of a record. The last label is the class id.
    _label_bytes: ClassVar[int]
    _classes: ClassVar[tuple[str, ...]]

    def __init__(
        self, root: str | Path, train: bool = True, transforms: ImageTransforms = (), download: bool = False
    ) -> None:
        super().__init__(transforms)
        self._paths = self._find(Path(root), self._files[train], download)
        self._map_files()
        labels = np.concatenate([records[:, self._label_bytes - 1] for records in self._records])
        if labels.max() >= len(self._classes):
            raise DataError(f"'{self._paths[0].parent}' contains the label {labels.max()}; download it again")
        self.targets = torch.from_numpy(labels.astype(np.int64))
        self.metainfo = class_metainfo(self._classes)

    def __len__(self) -> int:
        return len(self.targets)

    def load(self, index: int) -> dict[str, Any]:
        """Return image `index` and its class id."""
        number = bisect_right(self._starts, index) - 1
        record = self._records[number][index - self._starts[number]]
        image = record[self._label_bytes :].reshape(3, 32, 32)
        return {"inputs": image, "targets": self.targets[index]}

    def _map_files(self) -> None:
        self._records = []
        length = self._label_bytes + _PIXELS
        for path in self._paths:
            if not (size := path.stat().st_size) or size % length:
                raise DataError(f"'{path}' is damaged: {size} bytes; download it again")
            # Slicing a plain array is several times faster than slicing `np.memmap`.
            records = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
            self._records.append(records.reshape(-1, length))
        self._starts = np.cumsum([0, *map(len, self._records)]).tolist()

    def _find(self, root: Path, names: tuple[str, ...], download: bool) -> list[Path]:
        for folder in (root / self._folder, root):
            if all((folder / name).is_file() for name in names):
                return [folder / name for name in names]
        url = f"https://www.cs.toronto.edu/~kriz/{self._file}"
        if not download:
            raise DataError(
                f"{self._name} not found: neither '{root}' nor its subfolder '{self._folder}' contains "
                f"{', '.join(names)}. Unpack the binary version (not the Python version, which is pickled) from {url} "
                f"into '{root}', or pass download=True"
            )
        root.mkdir(parents=True, exist_ok=True)
        print_log(f"Downloading {self._name} from {url}", "current")
        with tempfile.TemporaryDirectory(prefix=f".{self._folder}-", dir=root) as temporary:
            archive = Path(temporary) / "archive.tar.gz"
            download_data(url, archive, self._md5, f"Download the archive and unpack it into '{root}'")
            with tarfile.open(archive) as tar:
                tar.extractall(temporary, filter="data")
            if not (root / self._folder).is_dir():  # another process may have created it
                (Path(temporary) / self._folder).rename(root / self._folder)
        return [root / self._folder / name for name in names]

    def __getstate__(self) -> dict[str, Any]:
        # Exclude the mapped files, because pickle would copy them to each spawned worker.
        return {key: value for key, value in self.__dict__.items() if key != "_records"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map_files()


_CIFAR100_CLASSES = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle "
    "caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant "
    "flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man "
    "maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree "
    "plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper "
    "snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train "
    "trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)


@DATASETS.register_module(name=["CIFAR10", "Cifar10"])
class CIFAR10(_Cifar):
    """50,000 training and 10,000 test photographs in ten classes. See the base class for the arguments."""

    _name, _file, _folder = "CIFAR-10", "cifar-10-binary.tar.gz", "cifar-10-batches-bin"
    _md5 = "c32a1d4ab5d03f1284b67883e8d87530"
    _files = ("test_batch.bin",), tuple(f"data_batch_{i}.bin" for i in range(1, 6))
    _label_bytes = 1
    _classes = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@DATASETS.register_module(name=["CIFAR100", "Cifar100"])
class CIFAR100(_Cifar):
    """50,000 training and 10,000 test photographs in a hundred classes. See the base class for the arguments."""

    _name, _file, _folder = "CIFAR-100", "cifar-100-binary.tar.gz", "cifar-100-binary"
    _md5 = "03b5dce01913d631647c71ecec9e9cb8"
    _files = ("test.bin",), ("train.bin",)
    _label_bytes = 2
    _classes = tuple(_CIFAR100_CLASSES.split())
