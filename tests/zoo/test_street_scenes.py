from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from slipstream.dataset.sources.cityscapes_classes import CITYSCAPES_CLASSES, CITYSCAPES_PALETTE
from slipstream.errors import ConfigError, DataError
from slipstream.zoo.street_scenes import dataset as street_scenes
from slipstream.zoo.street_scenes.dataset import StreetScenes, draw_street_scene

SMALL = (64, 128)


@cache
def scenes(count: int, size: tuple[int, int]) -> list[tuple[np.ndarray, np.ndarray]]:
    return [draw_street_scene(0, i, size) for i in range(count)]


def digest(index: int) -> str:
    image, mask = draw_street_scene(3, index, SMALL)
    return hashlib.sha256(image.tobytes() + mask.tobytes()).hexdigest()


def test_image_and_mask_have_the_requested_shape_and_dtype():
    for size in (SMALL, (96, 96), (33, 50)):
        image, mask = draw_street_scene(0, 0, size)
        assert image.shape == (*size, 3)
        assert image.dtype == np.uint8
        assert mask.shape == size
        assert mask.dtype == np.uint8


def test_scene_is_bit_identical_in_another_process_and_order():
    code = (
        "import hashlib; from slipstream.zoo.street_scenes.dataset import draw_street_scene as draw\n"
        "for i in (2, 1): a, b = draw(3, i, (64, 128)); "
        "print(hashlib.sha256(a.tobytes() + b.tobytes()).hexdigest())"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert [digest(1), digest(2)] == done.stdout.split()[::-1]


def test_different_seeds_and_indices_produce_different_scenes():
    assert len({draw_street_scene(s, i, SMALL)[1].tobytes() for s in range(2) for i in range(4)}) == 8


def test_larger_size_shows_the_same_scene():
    agreement = [
        (draw_street_scene(0, i, (256, 512))[1][::2, ::2] == mask).mean()
        for i, (_, mask) in enumerate(scenes(60, (128, 256))[:12])
    ]
    assert min(agreement) > 0.9
    assert np.mean(agreement) > 0.95


def test_each_class_occurs_often_enough_and_large_classes_dominate():
    masks = [mask for _, mask in scenes(200, SMALL)]
    counts = np.array([np.bincount(mask.ravel(), minlength=256) for mask in masks])
    present = (counts[:, :19] > 0).mean(0)
    assert present.min() > 0.05, dict(zip(CITYSCAPES_CLASSES, present, strict=True))
    share = counts.sum(0) / counts.sum()
    assert set(np.argsort(share[:19])[-6:]) >= {0, 2, 8, 10, 13}
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
    # The measured value is 0.11. It would be close to 1 if colors determined the classes.
    assert iou.mean() < 0.2


def test_images_have_texture_and_varying_brightness():
    images = [image for image, _ in scenes(60, (128, 256))]
    means = [image.mean() for image in images]
    assert np.std(means) > 15
    steps = [np.abs(np.diff(image.astype(int), axis=1)).mean() for image in images]
    assert np.median(steps) > 5


def test_dataset_loads_scenes_and_has_class_metainfo():
    data = StreetScenes(size=SMALL, length=5, seed=3)
    image, mask = data.load(4)
    expected = draw_street_scene(3, 4, SMALL)
    assert len(data) == 5
    assert np.array_equal(image, expected[0])
    assert np.array_equal(mask, expected[1])
    assert data.metainfo["classes"] == CITYSCAPES_CLASSES
    assert data.metainfo["palette"] == [list(color) for color in CITYSCAPES_PALETTE]
    assert data.metainfo["ignore_index"] == 255
    assert len(CITYSCAPES_CLASSES) == len(set(CITYSCAPES_PALETTE)) == 19


@pytest.mark.parametrize("length", [0, -3, 2.0, True])
def test_wrong_length_raises_error(length):
    with pytest.raises(ConfigError, match=f"length.*{length}"):
        StreetScenes(size=SMALL, length=length)


@pytest.mark.parametrize("size", [(31, 64), (64, 0), 64, (64,), (64.0, 128), None])
def test_wrong_size_raises_error(size):
    with pytest.raises(ConfigError, match="size"):
        StreetScenes(size=size, length=1)
    with pytest.raises(ConfigError, match="size"):
        draw_street_scene(0, 0, size)


def test_index_out_of_range_or_negative_seed_raises_error():
    data = StreetScenes(size=SMALL, length=5)
    for index in (-1, 5):
        with pytest.raises(
            IndexError, match=f"index {index} is out of range: StreetScenes has scenes 0 to 4"
        ):
            data.load(index)
    with pytest.raises(ConfigError, match="seed"):
        StreetScenes(size=SMALL, length=5, seed=-1)
    with pytest.raises(DataError, match="negative"):
        draw_street_scene(0, -1, SMALL)


def test_cache_key_contains_version_scene_and_size():
    keys = {
        StreetScenes(size, 9, seed).cache_key(i)
        for size in (SMALL, (96, 96))
        for seed in (1, 2)
        for i in (3, 4)
    }
    assert len(keys) == len({which for which, _ in keys}) == 8
    assert StreetScenes(SMALL, 9, 1).cache_key(3) == StreetScenes(SMALL, 5, 1).cache_key(3) in keys


@pytest.mark.parametrize("name", ["canvas.py", "dataset.py", "people.py", "shading.py", "vehicles.py"])
def test_changed_drawing_code_changes_the_version(tmp_path, monkeypatch, name):
    version = StreetScenes(SMALL, 1).cache_key(0)[1]
    for module in Path(street_scenes.__file__).parent.glob("*.py"):
        shutil.copy(module, tmp_path)
    assert (tmp_path / name).exists()
    monkeypatch.setattr(street_scenes, "__file__", str(tmp_path / "dataset.py"))
    street_scenes._drawing_version.cache_clear()
    try:
        assert StreetScenes(SMALL, 1).cache_key(0)[1] == version
        with (tmp_path / name).open("a") as file:
            file.write("# one more leg")
        street_scenes._drawing_version.cache_clear()
        assert StreetScenes(SMALL, 1).cache_key(0)[1] != version
    finally:
        street_scenes._drawing_version.cache_clear()
