"""Render the shapes of a scene: rasterize shape ids, then compute textures from the world position of each pixel."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.extras import extra
from slipstream.zoo.street_scenes import scene as sc
from slipstream.zoo.street_scenes.scene import Scene

Floats = NDArray[Any]
_Texture = tuple[Floats, Floats]


class _Pixels(NamedTuple):
    """World positions in meters and material parameters of pixels. `s` runs along upright surfaces."""

    x: Floats
    y: Floats
    z: Floats
    s: Floats
    size: Floats
    params: list[Floats]


def render(
    scene: Scene, size: tuple[int, int], rng: np.random.Generator
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the image (H, W, 3) and the class map (H, W), both uint8."""
    with extra("images"):
        from PIL import Image, ImageDraw, ImageFilter

    height, width = size
    shapes = sorted(scene.shapes, key=lambda shape: shape.key)
    canvas = Image.new("I", (width, height))
    draw = ImageDraw.Draw(canvas)
    for i, shape in enumerate(shapes):
        draw.polygon([(x * width - 0.5, y * height - 0.5) for x, y in shape.points], fill=i)
    ids = np.array(canvas, np.intp)
    mask = np.array([shape.cls for shape in shapes], np.uint8)[ids]
    materials = np.array([shape.material for shape in shapes], np.int8)[ids]
    table = np.array([shape.attributes for shape in shapes], np.float32).T
    clouds = np.zeros(size, np.float32)
    for cells, weight in ((4, 0.5), (10, 0.3), (26, 0.2)):
        grid = Image.fromarray(rng.integers(0, 256, (cells, cells), np.uint8))
        clouds += np.asarray(grid.resize((width, height), Image.Resampling.BICUBIC)) * np.float32(
            weight / 255
        )
    blend, shade, z = _textures(scene, ids, materials, table, clouds)
    first, second = (np.moveaxis(table[i : i + 3].take(ids, 1), 0, -1) for i in (3, 6))
    color = (first + (second - first) * blend[..., None]) * (shade * (0.92 + 0.16 * clouds))[..., None]
    color += (np.asarray(scene.haze, np.float32) - color) * (z / (z + np.float32(scene.reach)))[..., None]
    color *= 255 * np.asarray(scene.tint, np.float32)
    color *= 1.25 - color * np.float32(0.25 / 255)  # compress highlights smoothly
    image = Image.fromarray(np.clip(color, 0, 255).astype(np.uint8))
    # A slight blur, as of a lens, and sensor noise.
    blurred = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 0.65) * max(1.0, width / 1400)))
    noise = int(rng.integers(2, 9))
    noisy = np.asarray(blurred).astype(np.int16) + rng.integers(-noise, noise + 1, (*size, 3), np.int16)
    return np.clip(noisy, 0, 255).astype(np.uint8), mask


def _textures(
    scene: Scene, ids: NDArray[np.intp], materials: NDArray[np.int8], table: Floats, clouds: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return the weight of the second color, the brightness and the depth of each pixel."""
    height, width = ids.shape
    dx = ((np.arange(width, dtype=np.float32) + 0.5) / width - scene.vx)[None] / np.float32(scene.focal)
    rows = (np.arange(height, dtype=np.float32) + 0.5)[:, None] / height
    dy = (rows - scene.vy) / np.float32(2 * scene.focal)
    inverse = table[0].take(ids) * dx + table[1].take(ids) * dy + table[2].take(ids)
    z = 1 / np.maximum(inverse, np.float32(1e-3))
    x, y = dx * z, scene.height - dy * z
    sky = np.clip(
        (rows / scene.vy) ** 2 * 0.8 + np.clip((clouds + table[9].take(ids) - 0.45) * 2.5, 0, 1), 0, 1
    )
    blend, shade = np.where(materials == sc.SKY, sky, 0).astype(np.float32), np.ones(ids.shape, np.float32)
    for material, texture in enumerate(_TEXTURES):
        chosen = np.flatnonzero(materials == material)
        px, py, pz, shape = (values.ravel()[chosen] for values in (x, y, z, ids))
        params = [row[shape] for row in table[9:13]]
        pixels = _Pixels(px, py, pz, px + pz, pz / np.float32(scene.focal * width), params)
        blend.ravel()[chosen], shade.ravel()[chosen] = texture(pixels, scene)
    return blend, shade, z


@cache
def _tile(smooth: bool) -> Floats:
    """Return a 256 x 256 tile of noise with zero mean and unit deviation, at all scales or only at large scales."""
    white = np.random.default_rng(20160406).standard_normal((256, 256))
    frequency = np.hypot(np.fft.fftfreq(256)[:, None], np.fft.rfftfreq(256)[None]) * 256 + 1
    gain = frequency**-0.75 * (np.exp(-((frequency / 24) ** 2)) if smooth else 1.0)
    tile = np.fft.irfft2(np.fft.rfft2(white) * gain, (256, 256))
    # Rounded, because the last bits of the transform differ between platforms.
    return (np.round((tile - tile.mean()) / tile.std() * 64) / 64).astype(np.float32).ravel()


def _noise(u: Floats, v: Floats, smooth: bool = False) -> Floats:
    """Return noise at positions in texels, which must be at least -4096."""
    index = ((u + 4096).astype(np.intp) & 255) << 8 | (v + 4096).astype(np.intp) & 255
    return _tile(smooth).take(index)


# Each texture returns the weight of the second color and the brightness of each pixel.


def _plain(p: _Pixels, scene: Scene) -> _Texture:
    n = _noise(p.s * 60, p.y * 60, True)
    return np.clip(0.1 * n + 0.12, 0, 0.6), 0.8 + 0.22 * np.clip(p.y, 0, 1.2) + 0.04 * n


def _glass(p: _Pixels, scene: Scene) -> _Texture:
    n = _noise(p.s * 40 + p.y * 30, p.y * 10, True)
    return np.clip(0.12 + 0.08 * n + 0.22 * (p.y - 1.1), 0.02, 0.6), np.ones_like(n)


def _facade(p: _Pixels, scene: Scene) -> _Texture:
    """Compute rows of windows in plaster. The parameters are period, floor height, window fraction and phase."""
    period, floor, fraction, phase = p.params
    u, v = p.s / period + phase + 64, p.y / floor
    column, level = np.floor(u), np.floor(v)
    across, up = np.abs(u - column - 0.5), np.abs(v - level - 0.53)
    frame = (across < fraction / 2) & (up < fraction / 2 + 0.1)
    pane = (across < fraction / 2 - 0.04) & (up < fraction / 2 + 0.07) & (across > 0.025)
    detail = np.clip(1.6 - p.size * 5 / period, 0, 1)  # fades where windows are smaller than pixels
    dice = _noise(column * 37 + phase * 255, level * 91)
    stain = _noise(p.s * 20, p.y * 12, True) * 0.06 + _noise(p.s * 24, p.y * 24) * 0.05
    glow = np.where(dice > 0.5, 1.9, 0.15) if scene.dusk else 0.75 + 0.35 * dice
    shade = np.where(pane, np.maximum(glow, 0.1), np.where(frame, 1.22, 1 + stain))
    return np.where(pane, 0.85, 0) * detail + (1 - detail) * 0.25, 1 + (shade - 1) * detail


def _masonry(u: Floats, v: Floats, course: Floats, pixel: Floats, ratio: float) -> _Texture:
    """Compute rows of bricks or slabs, `ratio` times as long as the course height."""
    row = np.floor(v / course)
    column = u / (course * ratio) + 0.5 * (row % 2)
    joint = (v / course - row < 0.1) | (column - np.floor(column) < 0.06)
    detail = np.clip(1.5 - pixel * 3 / course, 0, 1)  # fades where bricks are smaller than pixels
    n = _noise(u * 30, v * 24, True)
    shade = 1 + (0.09 * _noise(row * 53, np.floor(column) * 29) - 0.22 * joint) * detail + 0.07 * n
    return np.clip(0.14 * n + 0.1, 0, 0.8), shade


def _brick(p: _Pixels, scene: Scene) -> _Texture:
    return _masonry(p.s, p.y, p.params[0], p.size, 2.6)


def _pickets(p: _Pixels, scene: Scene) -> _Texture:
    gap = (p.s / p.params[0] % 1 > 0.55) & (np.abs(p.y - 0.4) > 0.06)
    return np.where(gap, 0.95, 0.05), 1 + 0.08 * _noise(p.s * 30, p.y * 30)


def _sunlight(p: _Pixels, scene: Scene) -> Floats:
    """Return the brightness of the ground, with the shadows of houses and leaves."""
    roofs = _noise(np.floor(p.z / 9) * 31, np.full_like(p.z, scene.reach))
    leaves = _noise(p.x * 32, p.z * 24, True) > 1.7
    shade = np.where(p.x * scene.sun > 2.5 + 3.5 * roofs, 0.58, np.where(leaves, 0.85, 1.1))
    return shade if scene.sun else np.ones_like(p.x)


def _asphalt(p: _Pixels, scene: Scene) -> _Texture:
    """Compute grain and lane markings. The parameters are offset, lane width, whether lines are solid, and wear."""
    offset, lane, solid, wear = p.params
    position = (p.x - offset) / np.maximum(lane, 0.1)
    distance = np.abs(position - np.round(position)) * lane
    line = (lane > 0) & (distance < 0.08 + p.size * 0.4) & ((p.z / 7 % 1 < 0.5) | (solid > 0))
    grain = _noise(p.x * 30, p.z * 30)
    shade = 1 + 0.09 * grain * np.clip(1 - p.z / 40, 0.15, 1) + 0.07 * _noise(p.x * 32, p.z * 12, True)
    return np.where(line, np.clip(wear + 0.35 * grain, 0, 0.95), 0), shade * _sunlight(p, scene)


def _paving(p: _Pixels, scene: Scene) -> _Texture:
    blend, shade = _masonry(p.x, p.z, p.params[0], p.z * p.size, 1.0)
    return blend, shade * _sunlight(p, scene)


def _grass(p: _Pixels, scene: Scene) -> _Texture:
    blades = 1 + 0.18 * _noise(p.x * 50, p.z * 16)
    return np.clip(0.35 + 0.3 * _noise(p.x * 40, p.z * 25, True), 0, 1), blades * _sunlight(p, scene)


def _leaves(p: _Pixels, scene: Scene) -> _Texture:
    """Compute clumps of leaves, lit from above. The parameters are the phase, the center height and the radius."""
    phase, middle, radius, _ = p.params
    clump, leaf = _noise(p.s * 50 + phase * 5, p.y * 50, True), _noise(p.s * 40, p.y * 40 + phase)
    up = np.clip((p.y - middle) / np.maximum(radius, 0.1), -1, 1)
    return np.clip(0.42 - 0.26 * clump - 0.16 * leaf - 0.22 * up, 0, 1), 1 + 0.12 * up + 0.1 * leaf


_TEXTURES = (_plain, _glass, _facade, _brick, _pickets, _asphalt, _paving, _grass, _leaves)  # by material
