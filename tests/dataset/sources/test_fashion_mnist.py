from __future__ import annotations

import gzip
import hashlib
import io
import struct

import numpy as np
import pytest
import torch

from slipstream.dataset import FashionMNIST, SampleIndex
from slipstream.dataset.sources import fashion_mnist
from slipstream.errors import DataError

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def arrays(count=5):
    images = np.random.default_rng(0).integers(0, 256, (count, 28, 28), dtype=np.uint8)
    return images, np.arange(count, dtype=np.uint8) % 10


def idx(array):
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def make(folder, zipped=True, count=5):
    folder.mkdir(exist_ok=True)
    for name, array in zip((IMAGES, LABELS), arrays(count), strict=True):
        data = idx(array)
        (folder / (name + ".gz" * zipped)).write_bytes(gzip.compress(data) if zipped else data)
    return folder


@pytest.fixture(autouse=True)
def no_system_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(fashion_mnist, "_SYSTEM_FOLDER", tmp_path / "system")

    def refuse(*args, **kwargs):
        raise AssertionError("unexpected network access")

    monkeypatch.setattr("urllib.request.urlopen", refuse)


@pytest.mark.parametrize("zipped", [True, False])
def test_samples_match_the_bytes_of_the_files(tmp_path, zipped):
    dataset = FashionMNIST(make(tmp_path / "data", zipped))
    images, labels = arrays()
    assert len(dataset) == 5
    assert dataset.images.is_contiguous()
    assert dataset.images.shape == (5, 1, 28, 28)
    for i, sample in enumerate(dataset):
        assert (sample["inputs"].dtype, sample["inputs"].shape) == (torch.uint8, (1, 28, 28))
        assert (sample["targets"].dtype, sample["targets"].shape) == (torch.int64, ())
        np.testing.assert_array_equal(sample["inputs"][0].numpy(), images[i])
        assert int(sample["targets"]) == labels[i]
        assert dataset.get_cat_ids(i) == [labels[i]]
    assert len(dataset.metainfo["classes"]) == len(dataset.metainfo["palette"]) == 10


def test_augmentation_shifts_by_up_to_two_pixels_and_mirrors(tmp_path):
    dataset = FashionMNIST(make(tmp_path / "data"), augment=True)
    padded = np.pad(arrays()[0][0], 2)
    crops = {(y, x): padded[y : y + 28, x : x + 28] for y in range(5) for x in range(5)}
    possible = {c.tobytes() for c in crops.values()} | {c[:, ::-1].tobytes() for c in crops.values()}
    seen = {dataset[SampleIndex(0, 1, e)]["inputs"].contiguous().numpy().tobytes() for e in range(400)}
    assert seen == possible


def served(monkeypatch, files, sums=True):
    urls = []

    def urlopen(url, timeout):
        urls.append(url)
        return io.BytesIO(files[url.rsplit("/", 1)[1]])

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    if sums:
        found = {n.removesuffix(".gz"): hashlib.md5(d).hexdigest() for n, d in files.items()}
        monkeypatch.setattr(fashion_mnist, "_MD5", found)
    return urls


def test_downloaded_files_are_stored_and_reused(tmp_path, monkeypatch):
    files = {p.name: p.read_bytes() for p in make(tmp_path / "server").iterdir()}
    urls = served(monkeypatch, files)
    assert len(FashionMNIST(tmp_path / "new/data", download=True)) == 5
    assert len(FashionMNIST(tmp_path / "new/data", download=True)) == 5
    assert len(FashionMNIST(tmp_path / "new/data")) == 5
    assert len(urls) == 2
    assert sorted(p.name for p in (tmp_path / "new/data").iterdir()) == sorted(files)


def test_download_with_a_wrong_checksum_leaves_no_file(tmp_path, monkeypatch):
    files = {p.name: p.read_bytes() for p in make(tmp_path / "server").iterdir()}
    served(monkeypatch, files, sums=False)
    with pytest.raises(DataError, match=r"is damaged \(MD5 [0-9a-f]{32}, expected 8d4fb7e6c68d591d4c3dfef9"):
        FashionMNIST(tmp_path / "data", download=True)
    assert list((tmp_path / "data").iterdir()) == []
