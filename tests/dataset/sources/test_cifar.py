from __future__ import annotations

import hashlib
import io
import tarfile

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from slipstream.dataset import CIFAR10, CIFAR100, SampleIndex
from slipstream.errors import DataError

FOLDER = "cifar-10-batches-bin"
TRAIN = [f"data_batch_{i}.bin" for i in range(1, 6)]
TRANSFORMS = [
    {"type": "RandomCrop", "size": 32, "padding": 4},
    {"type": "RandomHorizontalFlip"},
    {"type": "ToTensor"},
    {"type": "Normalize", "mean": [0.4914, 0.4822, 0.4465], "std": [0.2023, 0.1994, 0.2010]},
]


def records(seed, count):
    found = np.random.default_rng(seed).integers(0, 256, (count, 3073), dtype=np.uint8)
    found[:, 0] %= 10
    return found


def make(folder, counts=(3, 1, 2, 4, 1), test=2):
    folder.mkdir(parents=True)
    for seed, (name, count) in enumerate(zip([*TRAIN, "test_batch.bin"], [*counts, test], strict=True)):
        (folder / name).write_bytes(records(seed, count).tobytes())
    return folder.parent


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("unexpected network access")

    monkeypatch.setattr("urllib.request.urlopen", refuse)


@pytest.mark.parametrize("inside", [FOLDER, "."])
def test_samples_match_the_bytes_of_the_files(tmp_path, inside):
    make(tmp_path / "data" / FOLDER)
    dataset = CIFAR10(tmp_path / "data" / (FOLDER if inside == "." else ""))
    expected = np.concatenate([records(seed, n) for seed, n in enumerate((3, 1, 2, 4, 1))])
    assert len(dataset) == 11
    for i, sample in enumerate(dataset):
        assert set(sample) == {"inputs", "targets"}
        assert (sample["inputs"].dtype, sample["targets"].dtype) == (torch.uint8, torch.int64)
        assert torch.equal(sample["inputs"], torch.from_numpy(expected[i, 1:].reshape(3, 32, 32)))
        assert sample["targets"].shape == ()
        assert int(sample["targets"]) == expected[i, 0]
        assert dataset.get_cat_ids(i) == [expected[i, 0]]
    assert len(CIFAR10(tmp_path / "data", train=False)) == 2
    assert len(dataset.metainfo["classes"]) == len(dataset.metainfo["palette"]) == 10
    with pytest.raises(IndexError, match=r"CIFAR10 has 11 samples, and no sample 11"):
        dataset[11]


def test_augmentation_depends_on_seed_epoch_and_index_only(tmp_path):
    make(tmp_path / FOLDER)

    def epoch(number, seed=1, workers=0):
        dataset = CIFAR10(tmp_path, transforms=TRANSFORMS)
        order = [SampleIndex(i, seed, number) for i in (10, 0, 4, 1, 2)]
        loader = DataLoader(dataset, batch_size=2, sampler=order, num_workers=workers)
        return torch.cat([batch["inputs"] for batch in loader])

    assert torch.equal(epoch(0), epoch(0))
    assert torch.equal(epoch(0), epoch(0, workers=2))
    assert not torch.equal(epoch(0), epoch(1))
    assert not torch.equal(epoch(0), epoch(0, seed=2))


@pytest.mark.parametrize("spoil", [lambda d: b"", lambda d: d[:-1], lambda d: d + b"x"])
def test_damaged_file_error_names_the_file(tmp_path, spoil):
    path = make(tmp_path / FOLDER) / FOLDER / "data_batch_2.bin"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(DataError, match="is damaged"):
        CIFAR10(tmp_path)


def archive(members):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return data.getvalue()


def serve(monkeypatch, data, set_md5=True):
    urls = []

    def urlopen(url, timeout):
        urls.append(url)
        return io.BytesIO(data)

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    if set_md5:
        for kind in (CIFAR10, CIFAR100):
            monkeypatch.setattr(kind, "_md5", hashlib.md5(data).hexdigest())
    return urls


def test_download_is_stored_and_reused(tmp_path, monkeypatch):
    files = {f"{FOLDER}/{p.name}": p.read_bytes() for p in (make(tmp_path / "x" / FOLDER) / FOLDER).iterdir()}
    urls = serve(monkeypatch, archive(files))
    assert len(CIFAR10(tmp_path / "new/data", download=True)) == 11
    assert len(CIFAR10(tmp_path / "new/data", train=False, download=True)) == 2
    assert urls == ["https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"]
    assert [p.name for p in (tmp_path / "new/data").iterdir()] == [FOLDER]


def test_download_with_a_wrong_checksum_leaves_no_file(tmp_path, monkeypatch):
    serve(monkeypatch, archive({f"{FOLDER}/test_batch.bin": b"x"}), set_md5=False)
    with pytest.raises(DataError, match=r"is damaged \(MD5 [0-9a-f]{32}, expected c32a1d4ab5d03f1284b6"):
        CIFAR10(tmp_path, download=True)
    assert list(tmp_path.iterdir()) == []
