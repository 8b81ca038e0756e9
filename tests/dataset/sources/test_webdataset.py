"""Tests of tar shards with WebDataset's naming convention: samples, their order on ranks and workers, and resuming."""

import io
import json
import os
import pickle
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from slipstream.dataset import SampleIndex, WebDataset, WebSegmentationDataset, build_dataloader, set_epoch
from slipstream.dataset.loading import samplers
from slipstream.errors import ConfigError, DataError
from slipstream.registry import DATASETS

CLASSES = ["sky", "road", "car"]


def encoded(array, kind="PNG"):
    buffer = io.BytesIO()
    Image.fromarray(np.asarray(array, np.uint8)).save(buffer, kind)
    return buffer.getvalue()


def pictures(index):
    rng = np.random.default_rng(index)
    return rng.integers(0, 256, (8, 6, 3), np.uint8), rng.integers(0, 3, (8, 6), np.uint8)


def sample_files(index):
    image, mask = pictures(index)
    return {
        "png": encoded(image),
        "seg.png": encoded(mask),
        "cls": str(index % 3).encode(),
        "json": json.dumps({"id": index}).encode(),
        "txt": f"caption ü{index}".encode(),
        "pkl": pickle.dumps(index),
    }


def write(path, samples):
    """Write a shard. `samples` maps each sample's key to a dict of its files by extension."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for key, files in samples.items():
            for extension, data in files.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return path


def array_header(shape):
    """Return the header of an `.npy` file."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, dict(descr="<f8", fortran_order=False, shape=shape))
    return buffer.getvalue()


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "user_cache"))


@pytest.fixture
def shards(tmp_path):
    """Write three shards with 4, 1 and 6 samples, and return a pattern that matches them."""
    counts, first = (4, 1, 6), 0
    for number, count in enumerate(counts):
        keys = {f"{i:06}": sample_files(i) for i in range(first, first + count)}
        write(tmp_path / f"data/train-{number:03}.tar", keys)
        first += count
    return str(tmp_path / "data/train-{000..002}.tar")


def test_samples_have_the_order_of_the_shards(shards, tmp_path):
    dataset = WebDataset(shards, classes=CLASSES)
    assert len(dataset) == 11
    for index in range(11):
        sample = dataset[index]
        np.testing.assert_array_equal(sample["inputs"].numpy(), pictures(index)[0].transpose(2, 0, 1))
        assert sample["targets"].dtype == torch.int64
        assert int(sample["targets"]) == index % 3
    assert dataset.metainfo["classes"] == tuple(CLASSES)
    assert dataset.get_cat_ids(4) == [1]
    with pytest.raises(IndexError, match="WebDataset has 11 samples, and no sample 11"):
        dataset[11]
    assert not list(tmp_path.glob("data/*.png")), "files were extracted from the shards"


def test_first_existing_extension_is_used(tmp_path):
    image, other = encoded(np.zeros((2, 2, 3))), encoded(np.full((2, 2, 3), 255))
    files = {"a": {"png": other, "jpg": image, "cls": b"0"}, "b": {"png": other, "cls": b"0"}}
    dataset = WebDataset(write(tmp_path / "a.tar", files), {"inputs": "jpg;png"})
    assert [int(sample["inputs"].max()) for sample in (dataset[0], dataset[1])] == [0, 255]


def test_arrays_are_read_without_pickle(tmp_path):
    buffers = [io.BytesIO(), io.BytesIO()]
    np.save(buffers[0], np.arange(3.0))
    np.save(buffers[1], np.array([{}]), allow_pickle=True)
    files = {str(i): {"npy": buffer.getvalue(), "bin": b"\0\1"} for i, buffer in enumerate(buffers)}
    dataset = WebDataset(write(tmp_path / "a.tar", files), {"x": "npy", "raw": "bin"})
    assert dataset[0]["x"].tolist() == [0, 1, 2]
    assert dataset[0]["raw"] == b"\0\1"
    with pytest.raises(DataError, match=r"cannot read '.*a\.tar:1\.npy': Object arrays cannot be loaded"):
        dataset[1]


@pytest.mark.parametrize("extension", ["pkl", "pyd", "pth", "pt", "pickle", "x.PKL", "cls;pkl"])
def test_pickled_files_are_refused(shards, extension):
    with pytest.raises(ConfigError, match=r"fields\.y: .* files are pickled"):
        WebDataset(shards, {"x": "png", "y": extension})


def test_augmentation_depends_only_on_seed_epoch_and_index(shards):
    transforms = [dict(type="RandomCrop", size=4), dict(type="ToTensor")]
    dataset = DATASETS.build(dict(type="WebDataset", shards=shards, transforms=transforms))
    again = [dataset[SampleIndex(3, 0, 1)]["inputs"] for _ in range(2)]
    assert torch.equal(*again)
    assert again[0].shape == (3, 4, 4)
    crops = {dataset[SampleIndex(3, 0, epoch)]["inputs"].numpy().tobytes() for epoch in range(8)}
    assert len(crops) > 1
    assert "device_params" in dataset[0]


def ids(dataset, rank, world_size, workers, epoch, monkeypatch):
    monkeypatch.setattr(samplers, "get_dist_info", lambda: (rank, world_size))
    cfg = dict(dataset=dataset, batch_size=2, num_workers=workers, shuffle=True)
    loader = build_dataloader(cfg, 3, "train_dataloader", True)
    set_epoch(loader, epoch)
    return [int(number) for batch in loader for number in batch["info"]["id"]]


def test_each_sample_is_read_once_for_any_number_of_ranks_and_workers(shards, monkeypatch):
    dataset = WebDataset(shards, {"info": "json"})
    orders = []
    for epoch in range(2):
        whole = ids(dataset, 0, 1, 0, epoch, monkeypatch)
        assert sorted(whole) == list(range(11))
        assert ids(dataset, 0, 1, 2, epoch, monkeypatch) == whole
        parts = [
            ids(dataset, rank, 2, workers=2 * rank, epoch=epoch, monkeypatch=monkeypatch) for rank in range(2)
        ]
        # Two ranks need an even number of samples, so the first sample of the epoch is repeated.
        assert [x for pair in zip(*parts, strict=True) for x in pair] == [*whole, whole[0]]
        orders.append(whole)
    assert orders[0] != orders[1]


def test_segmentation_samples_have_masks_and_can_be_cached(shards, tmp_path):
    dataset = WebSegmentationDataset(shards, CLASSES, cache=tmp_path / "decoded")
    for index in (0, 4, 10):
        image, mask = pictures(index)
        np.testing.assert_array_equal(dataset[index]["inputs"].numpy(), image.transpose(2, 0, 1))
        np.testing.assert_array_equal(dataset[index]["targets"].numpy(), mask)
    assert len(list((tmp_path / "decoded").glob("*/*.decoded"))) == 3
    assert dataset.get_cat_ids(0) == np.unique(pictures(0)[1]).tolist()


@pytest.mark.parametrize(
    ("extension", "data", "expected"),
    [
        ("png", b"not a picture", r"cannot read '.*a\.tar:x\.png'"),
        ("cls", b"cat", r"a\.tar:x\.cls': invalid literal"),
        ("cls", b"9" * 30, r"cannot read"),
        ("cls", b"7", r"contains 7, not a class id"),
        ("cls", b"-1", r"contains -1, not a class id"),
        ("json", b"{", "cannot read"),
        ("json", b"[" * 100_000, "cannot read"),
        ("txt", b"\xff", "cannot read"),
        ("npy", b"\x93NUMPY\1\0", "cannot read"),
        ("npy", b"", "cannot read"),
        ("npy", array_header(shape=(10**15,)), "cannot read"),
        ("npy", b"PK\3\4" + bytes(9), "magic string is not correct"),
        ("npy", b"\x93NUMPY\1\0\2\0{(", "cannot read"),
    ],
)
def test_damaged_file_raises_an_error_that_names_it(tmp_path, extension, data, expected):
    path = write(tmp_path / "a.tar", {"x": {extension: data}})
    dataset = WebDataset(path, {"targets": extension}, classes=CLASSES)
    with pytest.raises(DataError, match=expected):
        dataset[0]


def test_sample_without_a_field_raises_an_error(tmp_path):
    path = write(tmp_path / "a.tar", {"x": {"jpg": b"", "cls": b"0"}, "y": {"jpg": b"", "txt": b""}})
    with pytest.raises(DataError, match=r"sample 1 in '.*' has no file for 'targets' \(cls\), only jpg, txt"):
        WebDataset(path)


def test_samples_with_the_same_key_have_separate_cache_entries(tmp_path):
    path = tmp_path / "double.tar"
    with tarfile.open(path, "w") as archive:
        for index, key in enumerate("aba"):
            for extension, data in sample_files(index).items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    for _ in range(2):  # the second pass reads the cache
        dataset = WebSegmentationDataset(str(path), CLASSES, cache=tmp_path / "decoded")
        for index in range(3):
            np.testing.assert_array_equal(dataset[index]["targets"].numpy(), pictures(index)[1])


def test_shard_that_changes_during_training_raises_an_error(shards, tmp_path):
    dataset = WebSegmentationDataset(shards, CLASSES, cache=tmp_path / "decoded")
    path = tmp_path / "data/train-001.tar"
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(0, 0))
    dataset[0]
    with pytest.raises(DataError, match=r"train-001\.tar' has changed since its index was read"):
        dataset[4]
