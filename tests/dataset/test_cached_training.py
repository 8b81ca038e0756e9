"""Tests of the disk cache. Training with the cache must be bit-identical to training without it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from slipstream.dataset import ImageMaskFolder, SampleIndex
from slipstream.dataset.loading.loader import build_dataloader, set_epoch

TRANSFORMS = [
    {"type": "SegRandomRescale", "scales": [0.5, 1.5]},
    {"type": "SegPadShortToCropSize", "crop_size": [40, 30], "fill_mask": 255},
    {"type": "SegCropImageAndMask", "crop_size": [40, 30]},
    {"type": "SegRandomFlip", "prob": 0.5},
    {"type": "SegColorJitter", "brightness": 0.3, "contrast": 0.3, "saturation": 0.3},
]


@pytest.fixture
def root(tmp_path):
    for i in range(6):
        rng = np.random.default_rng(i)
        for kind, array in (
            ("img", rng.integers(0, 256, (36, 48, 3))),
            ("ann", rng.integers(0, 3, (36, 48))),
        ):
            (tmp_path / "data" / kind).mkdir(parents=True, exist_ok=True)
            Image.fromarray(array.astype(np.uint8)).save(tmp_path / f"data/{kind}/{i}.png")
    return tmp_path / "data"


def make(root, cache=None, **kwargs):
    options = {"data_root": root, "images": "img", "masks": "ann", "classes": ["a", "b", "c"]}
    return ImageMaskFolder(**options, transforms=TRANSFORMS, cache=cache, **kwargs)


def must_not_load(index):
    raise AssertionError(f"sample {index} was decoded again")


def batches(dataset, workers, epoch):
    cfg = {"dataset": dataset, "batch_size": 4, "num_workers": workers, "shuffle": True}
    loader = build_dataloader(cfg, 3, "train_dataloader", True)
    set_epoch(loader, epoch)
    return list(loader)


def trained(root, cache, workers):
    torch.manual_seed(0)
    net = torch.nn.Conv2d(3, 3, 3, padding=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    dataset = make(root, cache)
    for epoch in range(2):
        for batch in batches(dataset, workers, epoch):
            loss = torch.nn.functional.cross_entropy(
                net(batch["inputs"] / 255.0), batch["targets"].long(), ignore_index=255
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize("workers", [0, 2])
def test_training_is_bit_identical_with_and_without_the_cache(root, tmp_path, workers):
    plain = trained(root, None, 0)
    assert torch.equal(trained(root, tmp_path / "cache", workers), plain)
    assert len(list((tmp_path / "cache").glob("*/*.decoded"))) == 6
    assert torch.equal(trained(root, tmp_path / "cache", workers), plain)


def test_files_are_decoded_once_across_datasets(root, tmp_path, monkeypatch):
    first = [make(root, tmp_path / "cache")[SampleIndex(i, 0, 5)] for i in range(6)]
    again = make(root, tmp_path / "cache")
    monkeypatch.setattr(again, "load", must_not_load)
    for i in range(6):
        found = again[SampleIndex(i, 0, 5)]
        assert found.keys() == first[i].keys()
        assert all(torch.equal(found[key], first[i][key]) for key in found)


def test_damaged_cache_file_does_not_change_training(root, tmp_path):
    plain = trained(root, tmp_path / "cache", 0)
    path = next((tmp_path / "cache").glob("*/*.decoded"))
    data = bytearray(path.read_bytes())
    data[4096] ^= 1
    path.write_bytes(data)
    with pytest.warns(UserWarning, match=path.name):
        found = trained(root, tmp_path / "cache", 0)
    assert torch.equal(found, plain)
