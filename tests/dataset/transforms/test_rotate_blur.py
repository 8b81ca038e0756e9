"""Tests of rotation and blur: results compared with float64 references, and distributions of random parameters."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slipstream.dataset import SegRandomGaussianBlur, SegRandomRotate

pytest.importorskip("PIL")


def make(height=9, width=14, seed=0):
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return {"image": image, "mask": rng.integers(0, 19, (height, width), dtype=np.uint8)}


def rotated(sample, degrees, fill):
    """Return the image (in float64) and the mask, both rotated counterclockwise around the center."""
    height, width = sample["mask"].shape
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    image = np.tile(np.array(fill[:3], float), (height, width, 1))
    mask = np.full((height, width), fill[3])
    for y in range(height):
        for x in range(width):
            right, down = x + 0.5 - width / 2, y + 0.5 - height / 2
            u, v = cos * right - sin * down + width / 2, sin * right + cos * down + height / 2
            if not (0 <= u < width and 0 <= v < height):
                continue
            mask[y, x] = sample["mask"][int(v), int(u)]
            left, top = math.floor(u - 0.5), math.floor(v - 0.5)
            a, b = u - 0.5 - left, v - 0.5 - top
            rows = [min(max(row, 0), height - 1) for row in (top, top + 1)]
            columns = [min(max(column, 0), width - 1) for column in (left, left + 1)]
            near = sample["image"][np.ix_(rows, columns)].astype(float)
            image[y, x] = np.einsum("i,j,ijc->c", [1 - b, b], [1 - a, a], near)
    return image, mask


@pytest.mark.parametrize("degrees", [-35.0, 7.3, 120.0])
def test_image_and_mask_are_rotated_in_the_same_way(degrees):
    sample = make()
    transform = SegRandomRotate(degrees, degrees, fill_mask=19, fill_image=[10, 20, 30])
    found = transform(sample, np.random.default_rng(0))
    image, mask = rotated(sample, degrees, (10, 20, 30, 19))
    np.testing.assert_array_equal(found["mask"], mask)
    np.testing.assert_allclose(found["image"], image, atol=1.01)
    assert found["image"].dtype == found["mask"].dtype == np.uint8


def test_blur_is_a_gaussian_with_a_random_radius():
    sample = make(24, 24)
    rng = np.random.default_rng(5)
    rng.random()  # the decision to blur
    sigma = rng.random()
    assert sigma > 0.5
    found = SegRandomGaussianBlur(1.0)(sample, np.random.default_rng(5))
    assert found["mask"] is sample["mask"]
    offsets = np.arange(-6, 7)
    weights = np.exp(-(offsets**2) / (2 * sigma**2))
    weights /= weights.sum()
    wanted = np.pad(sample["image"].astype(float), ((6, 6), (6, 6), (0, 0)), mode="edge")
    for axis in (0, 1):
        wanted = np.apply_along_axis(np.convolve, axis, wanted, weights, mode="valid")
    # Pillow approximates the Gaussian with box filters.
    error = np.abs(found["image"] - wanted)
    before = np.abs(sample["image"] - wanted)
    assert error.mean() < 0.1 * before.mean()
