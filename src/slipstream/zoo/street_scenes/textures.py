"""The textures of a street scene: the appearance of each material at a world position.

A texture function returns the weight of the second color and the brightness of each pixel.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.zoo.street_scenes import canvas as sc
from slipstream.zoo.street_scenes.canvas import Canvas

__all__ = ["TEXTURES", "Floats", "Pixels", "between_bars", "noise"]

Floats = NDArray[np.float32]


class Pixels(NamedTuple):
    """Pixels of one material: their world positions in meters and the parameters of their shapes.

    `s` is the horizontal coordinate along an upright surface. `pitch` is the size of a pixel in meters.
    """

    x: Floats
    y: Floats
    z: Floats
    s: Floats
    pitch: Floats
    params: tuple[Floats, Floats, Floats, Floats]


@cache
def _tile(smooth: bool) -> Floats:
    """Return a flattened 256 x 256 tile of noise with zero mean and unit standard deviation.

    It contains noise at all scales or, if `smooth`, only at scales above about ten texels.
    """
    white = np.random.default_rng(20160406).standard_normal((256, 256))
    frequency = np.hypot(np.fft.fftfreq(256)[:, None], np.fft.rfftfreq(256)[None]) * 256 + 1
    gain = frequency**-0.75 * (np.exp(-((frequency / 24) ** 2)) if smooth else 1.0)
    tile = np.fft.irfft2(np.fft.rfft2(white) * gain, (256, 256))
    # Round the values, because the last bits of the transform differ between platforms.
    values: Floats = np.round((tile - tile.mean()) / tile.std() * 64).astype(np.float32).ravel() / 64
    return values


def noise(u: Floats, v: Floats, smooth: bool = False) -> Floats:
    """Return noise with zero mean and unit standard deviation at positions in texels, which must be at least -4096."""
    index = (u + 4096).astype(np.intp)
    index &= 255
    index <<= 8
    index |= (v + 4096).astype(np.intp) & 255
    return _tile(smooth).take(index)


def between_bars(s: Floats, y: Floats, p: Floats) -> NDArray[np.bool_]:
    """Return a mask of the gaps in a fence. `p` is (bar spacing, kind, height, solid fraction)."""
    gap, kind, height, solid = (float(v) for v in p)
    if kind == 2:
        return np.asarray((y / gap % 1 > max(solid, 0.5)) & (s / 2 % 1 > 0.06))
    rails = (y < height - 0.08) & (np.abs(y - 0.2) > 0.05)
    if kind == 0:
        return np.asarray(rails & (s / gap % 1 > solid))
    mesh = ((s + y) / gap % 1 > solid) & ((s - y) / gap % 1 > solid)
    return np.asarray(rails & mesh & (s / 2.5 % 1 > 0.04))


def _plain(p: Pixels, canvas: Canvas) -> tuple[Floats, Floats]:
    n = noise(p.s * 60, p.y * 60, True)
    return np.clip(0.1 * n + 0.12, 0, 0.6), 0.8 + 0.22 * np.clip(p.y, 0, 1.2) + 0.04 * n


def _glass(p: Pixels, canvas: Canvas) -> tuple[Floats, Floats]:
    """Compute the reflection of the street in a window: brighter at the top, with soft diagonal streaks."""
    n = noise(p.s * 40 + p.y * 30, p.y * 10, True)
    return np.clip(0.12 + 0.08 * n + 0.22 * (p.y - 1.1), 0.02, 0.6), np.ones_like(n)


def _facade(p: Pixels, canvas: Canvas) -> tuple[Floats, Floats]:
    """Compute rows of windows with frames and curtains, shop windows on the ground floor, and plaster in between."""
    period, floor, window_fraction, phase = p.params
    u, v = p.s / period + phase + 64, p.y / floor
    column, level = np.floor(u), np.floor(v)
    u, v = np.abs(u - column - 0.5), v - level
    shop = (window_fraction < 0) & (level <= 0)
    half_width = np.where(shop, 0.44, np.abs(window_fraction) * 0.5)
    half_height = np.where(shop, 0.33, np.minimum(np.abs(window_fraction) * 0.5 + 0.1, 0.4))
    distance = np.abs(v - np.where(shop, 0.42, 0.53))
    window = (u < half_width) & (distance < half_height) & (window_fraction != 0)
    pane = (u < half_width - 0.04) & (distance < half_height - 0.03) & ((u > 0.025) | shop)
    detail = np.clip(1.6 - p.pitch * 5 / period, 0, 1)
    dice = noise(column * 37 + phase * 255, level * 91)
    stain = noise(p.s * 20, p.y * 12, True) * 0.06 + noise(p.s * 24, p.y * 24) * 0.05
    glow = np.where(dice > 0.5, 1.9, 0.15) if canvas.light.dusk else 0.75 + 0.35 * dice
    curtain = np.where((dice > 0.6) & (v > 0.45), 0.45, 0.9)
    sky = 0.15 * noise(p.s * 40 + p.y * 20, p.y * 20, True)
    blend = np.where(pane, curtain, 0.0) * detail + (1 - detail) * 0.25
    shade = np.where(pane, np.maximum(glow + sky, 0.1), np.where(window, 1.22, 1.0 + stain))
    sill = (
        (distance > half_height)
        & (distance < half_height + 0.04)
        & (u < half_width + 0.05)
        & (window_fraction != 0)
    )
    return blend.astype(np.float32), (1 + (shade - 1) * detail - 0.3 * sill * detail).astype(np.float32)


def _brick(p: Pixels, canvas: Canvas) -> tuple[Floats, Floats]:
    course = p.params[0]
    row = np.floor(p.y / course)
    u = p.s / (course * 2.6) + 0.5 * (row % 2)
    joint = (p.y / course - row < 0.14) | (u - np.floor(u) < 0.06)
    detail = np.clip(1.5 - p.pitch * 3 / course, 0, 1) * (course < 5)
    variation = noise(row * 53, np.floor(u) * 29) * 0.09 * detail
    n = noise(p.s * 30, p.y * 24, True)
    blend = np.clip(0.14 * n + 0.1 + np.clip(0.5 - p.y, 0, 0.5) * 0.5, 0, 0.8)
    return blend, (1 - 0.24 * joint * detail + variation + 0.07 * n).astype(np.float32)


def _sunlight(p: Pixels, canvas: Canvas) -> Floats:
    """Return the brightness of the ground, including the shadows of houses and leaves."""
    if not canvas.light.sun_side:
        return np.ones_like(p.x)
    roofs = noise(np.floor(p.z / 9) * 31, np.full_like(p.z, canvas.light.reach))
    dapple = noise(p.x * 32, p.z * 24, True) > 1.7
    house = p.x * canvas.light.sun_side > 2.5 + 3.5 * roofs
    return np.where(house, np.float32(0.58), np.where(dapple, np.float32(0.85), np.float32(1.1)))


def _asphalt(p: Pixels, canvas: Canvas) -> tuple[Floats, Floats]:
    """Compute grain, wear and lane markings. `params` is (offset, lane width, solid, wear)."""
    offset, lane, solid, wear = p.params
    lane_position = (p.x - offset) / np.maximum(lane, 0.1)
    distance = np.abs(lane_position - np.round(lane_position)) * lane
    dash = (p.z / 7 % 1 < 0.5) | (solid > 0)
    grain = noise(p.x * 30, p.z * 30)
    patch = noise(p.x * 32, p.z * 12, True)
    line = (lane > 0) & (distance < 0.08 + p.pitch * 0.4) & dash
    blend = np.where(line, np.clip(wear + 0.35 * grain, 0, 0.95), np.float32(0))
    fade = np.clip(1 - p.z / 40, 0.15, 1)
    track = np.where(np.abs(distance - 0.7) < 0.3, np.float32(0.95), np.float32(1.0))
    return blend.astype(np.float32), (1 + 0.09 * grain * fade + 0.07 * patch) * track * _sunlight(p, canvas)


def _paving(p: Pixels, canvas: Canvas) -> tuple[Floats, Floats]:
    slab = np.maximum(p.params[0], 0.3)
    u, v = p.x / slab, p.z / slab
    joint = (u - np.floor(u) < 0.08) | (v - np.floor(v) < 0.08)
    detail = np.clip(1.5 - p.z * p.pitch / slab, 0, 1) * (p.params[0] > 0)
    variation = noise(np.floor(u) * 41, np.floor(v) * 23) * 0.07 * detail
    n = noise(p.x * 14, p.z * 14)
    shade = (1 - 0.22 * joint * detail + variation + 0.06 * n) * _sunlight(p, canvas)
    return np.clip(0.12 * n + 0.08, 0, 0.6), shade.astype(np.float32)


def _grass(p: Pixels, canvas: Canvas) -> tuple[Floats, Floats]:
    patch = noise(p.x * 40, p.z * 25, True)
    blade = noise(p.x * 50, p.z * 16)
    return np.clip(0.35 + 0.3 * patch, 0, 1), (1 + 0.18 * blade) * _sunlight(p, canvas)


def _foliage(p: Pixels, canvas: Canvas) -> tuple[Floats, Floats]:
    """Compute clumps of leaves, lit from above. `params` is (holes, phase, center height, radius)."""
    _, phase, middle, radius = p.params
    clump = noise(p.s * 50 + phase * 5, p.y * 50, True)
    leaf = noise(p.s * 40, p.y * 40 + phase)
    up = np.clip((p.y - middle) / np.maximum(radius, 0.1), -1, 1)
    blend: Floats = np.clip(0.42 - 0.26 * clump - 0.16 * leaf - 0.22 * up, 0, 1)
    return blend, 1 + 0.12 * up + 0.1 * leaf


TEXTURES = {
    sc.PLAIN: _plain, sc.BARS: _plain, sc.SPOKES: _plain, sc.GLASS: _glass, sc.FACADE: _facade,
    sc.BRICK: _brick, sc.ASPHALT: _asphalt, sc.PAVING: _paving, sc.GRASS: _grass, sc.FOLIAGE: _foliage,
}  # fmt: skip
