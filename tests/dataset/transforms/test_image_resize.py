"""Tests of image resizing and cropping. NumPy computes the expected pixels."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slipstream.dataset import CenterCrop, RandomResizedCropAndInterpolation, Resize

pytest.importorskip("PIL")


def image(height=8, width=12, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (3, height, width), dtype=np.uint8)


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    ("size", "source", "wanted"),
    [
        (4, (8, 12), (4, 6)),
        (5, (8, 12), (5, 7)),
        (5, (12, 8), (7, 5)),
        ((3, 9), (8, 12), (3, 9)),
        (8, (8, 8), (8, 8)),
    ],
)
def test_one_number_is_the_length_of_the_shorter_side(size, source, wanted):
    found = Resize(size)(image(*source), rng())
    assert found.shape == (3, *wanted)
    assert found.dtype == np.uint8


def test_bilinear_filter_weights_neighbors_by_distance():
    pixels = image()
    found = Resize((4, 6))(pixels, rng()).astype(float)
    wanted = pixels.astype(float)
    for axis in (1, 2):  # a triangle as wide as four source pixels
        count = wanted.shape[axis]
        places = np.arange(count) + 0.5
        weights = np.array([np.maximum(0, 1 - abs(places - 2 * (i + 0.5)) / 2) for i in range(count // 2)])
        weights /= weights.sum(1, keepdims=True)
        wanted = np.moveaxis(np.tensordot(weights, wanted, axes=(1, axis)), 0, axis)
    np.testing.assert_allclose(found, wanted, atol=1.01)


@pytest.mark.parametrize(
    ("size", "top", "left"), [(4, 2, 4), ((5, 9), 2, 2), ((8, 12), 0, 0), ((7, 11), 0, 0)]
)
def test_center_crop_rounds_odd_margins_to_even_numbers(size, top, left):
    height, width = (size, size) if isinstance(size, int) else size
    found = CenterCrop(size)(image(), rng())
    np.testing.assert_array_equal(found, image()[:, top : top + height, left : left + width])


def test_random_boxes_have_areas_and_ratios_in_range():
    crop = RandomResizedCropAndInterpolation(4, scale=(0.1, 0.6), ratio=(0.5, 2))
    generator, areas, ratios = rng(1), [], []
    for _ in range(500):
        left, top, right, bottom = crop.box(100, 140, generator)
        assert 0 <= left < right <= 140
        assert 0 <= top < bottom <= 100
        areas.append((right - left) * (bottom - top) / 14000)
        ratios.append((right - left) / (bottom - top))
    assert 0.09 < min(areas) < 0.15
    assert 0.5 < max(areas) < 0.61
    assert 0.48 < min(ratios) < 0.6
    assert 1.7 < max(ratios) < 2.1
    assert abs(np.mean([math.log(ratio) for ratio in ratios])) < 0.1


def test_the_box_is_resized_with_the_chosen_filter():
    crop = RandomResizedCropAndInterpolation((4, 6), scale=(1, 1), ratio=(1.5, 1.5))
    np.testing.assert_array_equal(crop(image(), rng()), Resize((4, 6))(image(), rng()))
    both = RandomResizedCropAndInterpolation((4, 6), scale=(1, 1), ratio=(1.5, 1.5), interpolation="random")
    generator = rng()
    found = {both(image(), generator).tobytes() for _ in range(20)}
    assert found == {Resize((4, 6), name)(image(), rng()).tobytes() for name in ("bilinear", "bicubic")}
