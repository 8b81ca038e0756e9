"""Tests of crops of resized images, compared with Pillow."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from slipstream.dataset.transforms.crop import bilinear


def noise(width, height, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def differences(image, scaled, box):
    left, top, right, bottom = box
    whole = np.asarray(Image.fromarray(image).resize(scaled, Image.Resampling.BILINEAR), int)
    found = bilinear(image, scaled, box)
    assert found.shape == (bottom - top, right - left, 3)
    assert found.dtype == np.uint8
    return np.abs(found - whole[top:bottom, left:right])


@st.composite
def boxes(draw):
    """Draw a source size, a resized size, and a box in the resized image, often at an edge."""
    source = draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))
    scaled = draw(st.tuples(st.integers(1, 60), st.integers(1, 60)))
    ranges = []
    for side in scaled:
        length = draw(st.integers(1, side))
        ranges.append(
            (first := draw(st.sampled_from([0, side - length, (side - length) // 2])), first + length)
        )
    return source, scaled, (ranges[0][0], ranges[1][0], ranges[0][1], ranges[1][1])


@given(case=boxes(), seed=st.integers(0, 100))
# torch would copy the pixels, because its input and output would have the same size along an axis.
@example(case=((12, 12), (13, 13), (3, 0, 10, 8)), seed=0)
@example(case=((697, 381), (752, 411), (746, 0, 752, 61)), seed=0)
@example(
    case=((1500, 3), (1000, 2), (990, 0, 1000, 2)), seed=0
)  # 1500 * (1000 / 1500) could be less than 1000 in floating point
@example(case=((1, 1), (7, 5), (2, 1, 7, 5)), seed=0)
@settings(max_examples=300, deadline=None)
def test_crop_matches_pillow_up_to_rounding(case, seed):
    source, scaled, box = case
    assert differences(noise(*source, seed), scaled, box).max() <= 2


def test_crop_without_resize_is_a_view():
    image = noise(30, 20)
    assert np.shares_memory(bilinear(image, (30, 20), (3, 2, 9, 8)), image)
