"""Tests of RandAugment: the operations, compared with NumPy, and the choice of operations and magnitudes."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.dataset import RandAugmentTransform
from slipstream.dataset.transforms.rand_augment import _WEIGHTS

pytest.importorskip("PIL")

NAMES = list(_WEIGHTS)


def image(height=9, width=12):
    return np.random.default_rng(0).integers(0, 256, (3, height, width), dtype=np.uint8)


class Chosen:
    """A mock generator whose numbers select one operation and the sign of its argument."""

    def __init__(self, name, sign):
        self.index, self.numbers = NAMES.index(name), iter([0.0, 0.0 if sign < 0 else 0.9])

    def choice(self, *args, **kwargs):
        return [self.index]

    def random(self):
        return next(self.numbers)


def applied(name, magnitude, sign=1, sections="", pixels=None):
    transform = RandAugmentTransform(f"rand-m{magnitude}-n1{sections}", img_mean=[0.0, 0.5, 1.0])
    pixels = image() if pixels is None else pixels
    found = transform(pixels, Chosen(name, sign))
    assert found.shape == pixels.shape
    assert found.dtype == np.uint8
    return found.astype(int)


def blended(degenerate, factor):
    return np.clip(degenerate + factor * (image().astype(float) - degenerate), 0, 255)


def gray():
    red, green, blue = image().astype(float)
    return 0.299 * red + 0.587 * green + 0.114 * blue


@pytest.mark.parametrize(
    ("sections", "sign", "factor"), [("", 1, 0.1 + 1.8 * 0.7), ("-inc1", 1, 1.63), ("-inc1", -1, 0.37)]
)
def test_enhancements_blend_with_a_degenerate_image(sections, sign, factor):
    for name, degenerate in (("Brightness", 0.0), ("Color", gray()), ("Contrast", round(gray().mean()))):
        found = applied(name, 7, sign, sections)
        np.testing.assert_allclose(found, blended(degenerate, factor), atol=2.0, err_msg=name)


def test_autocontrast_and_equalize_use_the_whole_range():
    pixels = np.stack([np.linspace(low, 200, 64 * 64).reshape(64, 64) for low in (50, 90, 120)]).astype(
        np.uint8
    )
    low, high = pixels.min((1, 2), keepdims=True), pixels.max((1, 2), keepdims=True)
    wanted = (pixels.astype(float) - low) * 255 / (high - low)
    np.testing.assert_allclose(applied("AutoContrast", 5, pixels=pixels), wanted, atol=1)
    found = applied("Equalize", 5, pixels=pixels)
    # The result of Equalize is proportional to the fraction of darker pixels.
    for channel, wanted in zip(found, pixels, strict=True):
        below = np.searchsorted(np.sort(wanted.ravel()), wanted.ravel()).reshape(wanted.shape) / wanted.size
        np.testing.assert_allclose(channel, 255 * below, atol=3)


def moved(matrix):
    """Sample the image bilinearly at the positions to which the matrix maps pixels. Use the fill color outside the
    image."""
    pixels = image().astype(float)
    _, height, width = pixels.shape
    y, x = np.mgrid[:height, :width] + 0.5
    a, b, c, d, e, f = matrix
    u, v = a * x + b * y + c, d * x + e * y + f
    inside = (u >= 0) & (u < width) & (v >= 0) & (v < height)
    left, top = np.floor(u - 0.5).astype(int), np.floor(v - 0.5).astype(int)
    dx, dy = u - 0.5 - left, v - 0.5 - top
    found = np.zeros_like(pixels)
    for row, wy in ((top, 1 - dy), (top + 1, dy)):
        for column, wx in ((left, 1 - dx), (left + 1, dx)):
            found += wy * wx * pixels[:, row.clip(0, height - 1), column.clip(0, width - 1)]
    fill = np.array([0, 128, 255])[:, None, None]
    return np.where(inside, found, fill)


@pytest.mark.parametrize("sign", [1, -1])
def test_geometric_operations_move_pixels(sign):
    value = sign * 0.8
    cos, sin = np.cos(np.radians(30 * value)), np.sin(np.radians(30 * value))
    center = np.array([6, 4.5]) - np.array([[cos, -sin], [sin, cos]]) @ [6, 4.5]
    matrices = {
        "Rotate": (cos, -sin, center[0], sin, cos, center[1]),
        "ShearX": (1, 0.3 * value, 0, 0, 1, 0),
        "ShearY": (1, 0, 0, 0.3 * value, 1, 0),
        "TranslateXRel": (1, 0, 0.45 * value * 12, 0, 1, 0),
        "TranslateYRel": (1, 0, 0, 0, 1, 0.45 * value * 9),
    }
    for name, matrix in matrices.items():
        np.testing.assert_allclose(applied(name, 8, sign), moved(matrix), atol=1.01, err_msg=name)


def recorded(config, count=400):
    """Return the names and magnitudes of the operations that are applied to `count` images."""
    transform, found = RandAugmentTransform(config), []
    transform._apply = lambda name, picture, magnitude, rng: found.append((name, magnitude)) or picture
    rng = np.random.default_rng(0)
    for _ in range(count):
        transform(image(), rng)
    return found


def test_half_of_the_chosen_operations_are_applied_with_the_magnitude():
    found = recorded("rand-m7-n3")
    assert 0.45 < len(found) / 1200 < 0.55
    assert {magnitude for _, magnitude in found} == {7.0}
    counts = [sum(name == other for name, _ in found) for other in NAMES]
    assert min(counts) > 0.5 * max(counts)


def test_weights_prefer_geometric_operations():
    names = [name for name, _ in recorded("rand-m5-n2-w0")]
    assert {"Posterize", "Invert"}.isdisjoint(names)
    assert names.count("Rotate") > names.count("Color")
