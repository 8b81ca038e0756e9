from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from slipstream.dataset import (
    SegCropImageAndMask,
    SegPadShortToCropSize,
    SegRandomFlip,
    SegRandomRescale,
    SegRescale,
    apply_transforms,
)
from slipstream.dataset.transforms.crop import CropRegion


def make(width, height, seed=0):
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return {"image": image, "mask": rng.integers(0, 256, (height, width), dtype=np.uint8)}


# ---- reference: each transform with Pillow on whole images ---------------------------------------------


def flip(transform, image, mask, rng):
    mirrored = rng.random() < transform.prob
    return (ImageOps.mirror(image), ImageOps.mirror(mask)) if mirrored else (image, mask)


def resize(image, mask, scale):
    size = tuple(max(1, math.floor(side * scale)) for side in image.size)
    return image.resize(size, Image.Resampling.BILINEAR), mask.resize(size, Image.Resampling.NEAREST)


def rescale(transform, image, mask, rng):
    if transform.scale_factor:
        return resize(image, mask, transform.scale_factor)
    if transform.short_size:
        return resize(image, mask, Fraction(transform.short_size, min(image.size)))
    return resize(image, mask, Fraction(transform.long_size, max(image.size)))


def random_rescale(transform, image, mask, rng):
    return resize(image, mask, rng.uniform(*transform.scales))


def pad(transform, image, mask, rng):
    right, down = (max(0, c - s) for c, s in zip(transform.crop_size, image.size, strict=True))
    if not right and not down:
        return image, mask
    top, left = -(-down // 2), -(-right // 2)
    if transform.padding_mode == "random":
        top, left = int(rng.integers(down + 1)), int(rng.integers(right + 1))
    border = (left, top, right - left, down - top)
    return (
        ImageOps.expand(image, border, transform.fill[:3]),
        ImageOps.expand(mask, border, transform.fill[3]),
    )


def crop(transform, image, mask, rng):
    (width, height), (spare_x, spare_y) = transform.crop_size, np.subtract(image.size, transform.crop_size)
    top, left = round(spare_y / 2), round(spare_x / 2)
    if transform.mode == "random":
        top, left = int(rng.integers(spare_y + 1)), int(rng.integers(spare_x + 1))
    box = (left, top, left + width, top + height)
    return image.crop(box), mask.crop(box)


REFERENCE = {
    SegRandomFlip: flip,
    SegRescale: rescale,
    SegRandomRescale: random_rescale,
    SegPadShortToCropSize: pad,
    SegCropImageAndMask: crop,
}


def one_by_one(transforms, sample, rng):
    image, mask = Image.fromarray(sample["image"]), Image.fromarray(sample["mask"])
    for transform in transforms:
        image, mask = REFERENCE[type(transform)](transform, image, mask, rng)
    return np.asarray(image), np.asarray(mask)


SIDES = st.integers(1, 40)
PAIRS = st.tuples(SIDES, SIDES)
SCALES = st.one_of(st.sampled_from([0.25, 0.5, 0.75, 1.0, 1.5, 2.0]), st.floats(0.2, 2.5))
FLIPS = st.builds(SegRandomFlip, st.sampled_from([0.0, 0.5, 1.0]))
RESCALES = st.one_of(
    st.builds(SegRescale, scale_factor=SCALES),
    st.builds(SegRescale, short_size=SIDES),
    st.builds(SegRescale, long_size=SIDES),
    st.builds(SegRandomRescale, st.tuples(SCALES, SCALES)),
)
MODES = st.sampled_from(["center", "random"])
PADS = st.builds(
    SegPadShortToCropSize, PAIRS, st.sampled_from([19, 255]), st.sampled_from([0, (1, 2, 3)]), MODES
)


@st.composite
def crops(draw):
    """Return padding and a crop of the same size, so that the crop fits every image."""
    size, fill = draw(PAIRS), draw(st.sampled_from([19, 255]))
    mode = draw(MODES)
    return [SegPadShortToCropSize(size, fill, padding_mode=mode), SegCropImageAndMask(size, draw(MODES))]


SINGLE = st.one_of(FLIPS, RESCALES, PADS).map(lambda transform: [transform])
CHAINS = st.lists(st.one_of(SINGLE, crops()), max_size=6)
RECIPE = [
    [SegRandomFlip(1.0)],
    [SegRandomRescale((0.25, 1.75))],
    [SegPadShortToCropSize((24, 24), 19)],
    [SegCropImageAndMask((24, 24), "random")],
]


@given(size=PAIRS, seed=st.integers(0, 10_000), chain=CHAINS)
# A flip before a resize reverses the side to which nearest-neighbor ties are resolved.
@example((16, 8), 1, [[SegRandomFlip(1.0)], [SegRescale(0.5)]])
@example((37, 23), 3, RECIPE)
@settings(max_examples=300, deadline=None)
def test_composed_transforms_match_pillow_one_by_one(size, seed, chain):
    transforms = [transform for group in chain for transform in group]
    sample = make(*size, seed)
    image, mask = one_by_one(transforms, sample, np.random.default_rng(seed))
    rng = np.random.default_rng(seed)
    found = apply_transforms(transforms, sample, rng)
    np.testing.assert_array_equal(found["targets"].numpy(), mask)
    # Each resize rounds twice, once per axis.
    resizes = sum(isinstance(t, SegRescale | SegRandomRescale) for t in transforms)
    difference = found["inputs"].numpy().transpose(1, 2, 0).astype(int) - image
    assert np.abs(difference).max(initial=0) <= 2 * resizes
    reference = np.random.default_rng(seed)
    one_by_one(transforms, sample, reference)
    assert rng.bit_generator.state == reference.bit_generator.state


@pytest.mark.parametrize("scale", [0.5, 1.0, 1.5])
def test_only_visible_pixels_are_read(scale):
    class Recorded(np.ndarray):
        def __getitem__(self, key):
            rows, columns = key
            read.append((rows.start, rows.stop, columns.start, columns.stop))
            return np.asarray(self)[key]

    read = []
    sample = {key: value.view(Recorded) for key, value in make(200, 100).items()}
    region = CropRegion.identity(sample["mask"]).resized((round(200 * scale), round(100 * scale)))
    region.cropped(round(100 * scale), round(40 * scale), (round(20 * scale), round(10 * scale))).render(
        sample
    )
    assert len(read) == 2  # image and mask
    for top, bottom, left, right in read:
        assert 36 <= top <= 41
        assert 49 <= bottom <= 54
        assert 96 <= left <= 101
        assert 119 <= right <= 124


def test_image_box_excludes_padding():
    whole = CropRegion.identity(np.zeros((4, 6), np.uint8))
    padded = whole.padded(3, 1, (10, 8), (7, 7, 7, 7))
    assert padded.image_box == (3, 1, 9, 5)
    assert padded.flipped().image_box == (1, 1, 7, 5)
    assert padded.cropped(4, 0, (3, 3)).image_box == (0, 1, 3, 3)
    nothing = padded.cropped(0, 0, (2, 8))
    assert nothing.image_box[0] == nothing.image_box[2]
    sample = {"image": np.zeros((4, 6, 3), np.uint8), "mask": np.zeros((4, 6), np.uint8)}
    assert all((array == 7).all() for array in nothing.render(sample))
