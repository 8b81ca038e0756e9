from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import torch

from slipstream.dataset import CityscapesDataset
from slipstream.dataset.sources.cityscapes_labels import CITYSCAPES_CLASSES, CITYSCAPES_PALETTE
from slipstream.errors import ConfigError
from slipstream.zoo.street_scenes import StreetScenes, draw_street_scene

SMALL = (64, 128)


@cache
def scenes(count: int, size: tuple[int, int]) -> list[tuple[np.ndarray, np.ndarray]]:
    return [draw_street_scene(0, i, size) for i in range(count)]


def digest(index: int) -> str:
    image, mask = draw_street_scene(3, index, SMALL)
    return hashlib.sha256(image.tobytes() + mask.tobytes()).hexdigest()


def test_scene_is_bit_identical_in_another_process_and_order():
    code = (
        "import hashlib; from slipstream.zoo.street_scenes import draw_street_scene as draw\n"
        "for i in (2, 1): a, b = draw(3, i, (64, 128)); "
        "print(hashlib.sha256(a.tobytes() + b.tobytes()).hexdigest())"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert [digest(1), digest(2)] == done.stdout.split()[::-1]
    assert len({draw_street_scene(s, i, SMALL)[1].tobytes() for s in range(2) for i in range(4)}) == 8


def test_larger_size_shows_the_same_scene():
    pairs = zip(range(12), scenes(60, (128, 256)), strict=False)
    agreement = [(draw_street_scene(0, i, (256, 512))[1][::2, ::2] == mask).mean() for i, (_, mask) in pairs]
    assert min(agreement) > 0.9
    assert np.mean(agreement) > 0.95


def test_each_class_occurs_often_enough():
    masks = [mask for _, mask in scenes(200, SMALL)]
    counts = np.array([np.bincount(mask.ravel(), minlength=256) for mask in masks])
    present = (counts[:, :19] > 0).mean(0)
    assert present.min() > 0.05, dict(zip(CITYSCAPES_CLASSES, present, strict=True))
    share = counts.sum(0) / counts.sum()
    assert set(np.argsort(share[:19])[-6:]) >= {0, 2, 8, 13}
    assert share[1] > 0.02
    assert 0.01 < share[255] < 0.08
    assert share[19:255].sum() == 0


def test_color_does_not_determine_the_class():
    def quantized(image):
        return (image.astype(np.int64) >> 4) @ np.array([256, 16, 1])

    data = scenes(60, (128, 256))
    votes = np.zeros((4096, 19))
    for image, mask in data[:30]:
        np.add.at(votes, (quantized(image)[mask < 19], mask[mask < 19]), 1)
    confusion = np.zeros((19, 19))
    for image, mask in data[30:]:
        guess = votes.argmax(1)[quantized(image)]
        np.add.at(confusion, (mask[mask < 19], guess[mask < 19]), 1)
    hit = np.diag(confusion)
    iou = hit / np.maximum(confusion.sum(0) + confusion.sum(1) - hit, 1)
    assert iou.mean() < 0.2  # close to 1 if colors determined the classes


def test_dataset_loads_scenes_and_checks_its_options():
    data = StreetScenes(size=SMALL, length=5, seed=3)
    for ours, expected in zip(data.load(4), draw_street_scene(3, 4, SMALL), strict=True):
        assert np.array_equal(ours, expected)
    assert data.metainfo["classes"] == CITYSCAPES_CLASSES
    assert data.metainfo["palette"] == [list(color) for color in CITYSCAPES_PALETTE]
    assert (
        data.cache_key(3) == StreetScenes(SMALL, 9, 3).cache_key(3) != StreetScenes(SMALL, 5, 4).cache_key(3)
    )
    with pytest.raises(IndexError, match="no sample 5"):
        data.load(5)
    for wrong in (dict(length=0), dict(size=(31, 64)), dict(size=64), dict(seed=-1)):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            StreetScenes(**wrong)


def test_command_writes_the_scenes_in_the_cityscapes_layout(tmp_path):
    words = [str(tmp_path), "--train", "5", "--val", "2", "--size", "32x64", "--seed", "3"]
    subprocess.run([sys.executable, "-m", "slipstream.zoo.street_scenes.folder", *words], check=True)
    for split, count, seed in (("train", 5, 3), ("val", 2, 4)):
        listed = CityscapesDataset(
            tmp_path, list_file=f"lists/{split}.lst", labels_csv_path="lists/labels.csv", ignore_label=255
        )
        for ours, scene in zip(listed, StreetScenes((32, 64), count, seed), strict=True):
            assert torch.equal(ours["inputs"], scene["inputs"])
            assert torch.equal(ours["targets"], scene["targets"])
    assert len({p.name for p in (tmp_path / "leftImg8bit/train").iterdir()}) == 3
