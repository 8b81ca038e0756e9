from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slipstream.dataset import (
    SegColorJitter,
    SegCropImageAndMask,
    SegPadShortToCropSize,
    SegPadToDivisible,
    SegRandomFlip,
    SegRandomGaussianBlur,
    SegRandomRescale,
    SegRandomRotate,
    SegRescale,
    SegResize,
)


def make(height=6, width=8, seed=0):
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return {"image": image, "mask": rng.integers(0, 19, (height, width), dtype=np.uint8)}


def aligned(height, width):
    """Return a sample whose mask equals each image channel, to check that both are transformed in the same way."""
    mask = np.arange(height * width, dtype=np.uint8).reshape(height, width)
    return {"image": np.stack([mask, mask, mask], axis=2), "mask": mask}


def rng(seed=0):
    return np.random.default_rng(seed)


ALL = [
    SegRandomFlip(1.0),
    SegRescale(0.5),
    SegRandomRescale((0.5, 2.0)),
    SegPadShortToCropSize((12, 9), 19, padding_mode="random"),
    SegCropImageAndMask((4, 3)),
    SegColorJitter(0.5, 0.5, 0.5),
    SegResize(9, 4),
    SegPadToDivisible(7, 19),
    SegRandomRotate(),
    SegRandomGaussianBlur(1.0),
]


@pytest.mark.parametrize("transform", ALL, ids=lambda t: type(t).__name__)
def test_transforms_return_uint8_and_do_not_modify_their_input(transform):
    sample = make()
    before = {key: value.copy() for key, value in sample.items()}
    for value in sample.values():
        value.flags.writeable = False
    result = transform(sample, rng())
    assert result["image"].dtype == result["mask"].dtype == np.uint8
    assert result["image"].shape == (*result["mask"].shape, 3)
    assert all(np.array_equal(before[key], sample[key]) for key in before)
    again = transform(sample, rng())
    assert all(np.array_equal(again[key], result[key]) for key in result)


def test_flip_mirrors_image_and_mask():
    sample = make()
    flipped = SegRandomFlip(1.0)(sample, rng())
    np.testing.assert_array_equal(flipped["image"], np.flip(sample["image"], 1))
    np.testing.assert_array_equal(flipped["mask"], np.flip(sample["mask"], 1))


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 80))
@example(7, 7, 61)  # in floating point, 61 / 7 * 7 is less than 61
@settings(max_examples=60, deadline=None)
def test_rescale_returns_the_exact_side_length(height, width, size):
    sample = {"image": np.zeros((height, width, 3), np.uint8), "mask": np.zeros((height, width), np.uint8)}
    assert min(SegRescale(short_size=size)(sample, rng())["mask"].shape) == size
    long = SegRescale(long_size=size)(sample, rng())
    assert max(long["mask"].shape) == size
    assert long["image"].shape == (*long["mask"].shape, 3)
    assert min(long["mask"].shape) == max(
        1, math.floor(Fraction(min(height, width) * size, max(height, width)))
    )


def test_random_rescale_draws_uniformly_between_its_bounds():
    sample, generator = make(100, 100), rng()
    sides = [SegRandomRescale((0.5, 2.0))(sample, generator)["mask"].shape[0] for _ in range(300)]
    assert 50 <= min(sides) < 60
    assert 190 < max(sides) <= 200
    assert abs(np.mean(sides) - 125) < 10


def test_padding_in_the_center_fills_image_and_mask():
    sample = aligned(2, 3)
    padded = SegPadShortToCropSize((6, 5), fill_mask=99, fill_image=(1, 2, 3))(sample, rng())
    mask = np.full((5, 6), 99)
    mask[2:4, 2:5] = sample["mask"]
    np.testing.assert_array_equal(padded["mask"], mask)
    np.testing.assert_array_equal(padded["image"][2:4, 2:5], sample["image"])
    np.testing.assert_array_equal(padded["image"][0, 0], [1, 2, 3])
    np.testing.assert_array_equal(padded["image"][4, 5], [1, 2, 3])


def test_random_crops_cover_every_position_of_image_and_mask():
    sample, generator = aligned(5, 7), rng()
    corners = set()
    for _ in range(200):
        crop = SegCropImageAndMask((4, 3), "random")(sample, generator)
        assert crop["mask"].shape == (3, 4)
        np.testing.assert_array_equal(crop["image"][:, :, 2], crop["mask"])
        corners.add(int(crop["mask"][0, 0]))
    assert corners == {y * 7 + x for y in range(3) for x in range(4)}


def gray(image):
    return image.astype(np.float64) @ [0.299, 0.587, 0.114]


@pytest.mark.parametrize("factor", [0.0, 0.4, 1.0, 1.7])
@pytest.mark.parametrize("kind", ["brightness", "contrast", "saturation"])
def test_color_changes_follow_the_torchvision_formulas(kind, factor):
    sample = make(16, 16)
    image = sample["image"].astype(np.float64)
    other = {"brightness": 0 * image, "contrast": gray(image).mean() + 0 * image}.get(
        kind, gray(image)[..., None]
    )
    expected = np.clip(factor * image + (1 - factor) * other, 0, 255)
    found = SegColorJitter(**{kind: (factor, factor)})(sample, rng())
    np.testing.assert_allclose(found["image"], expected, atol=2)
    assert found["mask"] is sample["mask"]


@pytest.mark.parametrize(("h", "w"), [(3, 4), (12, 5), (6, 8), (1, 1)])
def test_resize_matches_pillow(h, w):
    pil = pytest.importorskip("PIL.Image")
    sample = make()
    found = SegResize(h, w)(sample, rng())
    image, mask = (pil.fromarray(sample[key]) for key in ("image", "mask"))
    wanted = np.asarray(image.resize((w, h), pil.Resampling.BILINEAR))
    np.testing.assert_allclose(found["image"].astype(int), wanted.astype(int), atol=1)
    np.testing.assert_array_equal(found["mask"], mask.resize((w, h), pil.Resampling.NEAREST))


@pytest.mark.parametrize(("value", "height", "width"), [(4, 8, 8), (5, 10, 10), (2, 6, 8), (32, 32, 32)])
@pytest.mark.parametrize("flip", [False, True])
def test_padding_to_a_multiple_is_added_at_the_right_and_bottom(value, height, width, flip):
    sample = make()
    wanted = {key: values[:, ::-1] if flip else values for key, values in sample.items()}
    sample = SegRandomFlip(float(flip))(sample, rng())
    found = SegPadToDivisible(value, fill_mask=19, fill_image=[1, 2, 3])(sample, rng())
    assert found["mask"].shape == (height, width)
    np.testing.assert_array_equal(found["mask"][:6, :8], wanted["mask"])
    np.testing.assert_array_equal(found["image"][:6, :8], wanted["image"])
    outside = np.ones((height, width), bool)
    outside[:6, :8] = False
    assert (found["mask"][outside] == 19).all()
    assert (found["image"][outside] == [1, 2, 3]).all()
