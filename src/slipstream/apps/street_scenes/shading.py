"""Render the shapes of a canvas: rasterize shape ids, then compute textures from the world position of each pixel."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.apps.street_scenes import canvas as sc
from slipstream.apps.street_scenes.canvas import Canvas, Shape
from slipstream.apps.street_scenes.textures import PAINTS, Floats, Pixels, between_bars, noise
from slipstream.extras import extra

__all__ = ["render"]

Ids = NDArray[np.intp]
_SEE_THROUGH = (sc.BARS, sc.SPOKES, sc.FOLIAGE)


class _Hole(NamedTuple):
    """A partly transparent shape: its id, the corner of its bounding box, and the ids in the box before painting."""

    shape: int
    left: int
    top: int
    under: Ids


def render(
    canvas: Canvas, size: tuple[int, int], rng: np.random.Generator
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the image (H, W, 3) and the class map (H, W) of a canvas, both uint8."""
    shapes = sorted(canvas.shapes, key=_key)
    clouds, finish = _cloud(rng, size), rng.random(2)
    ids, holes = _rasterize(shapes, size)
    mask = np.array([s.cls for s in shapes], np.uint8).take(ids)
    table = np.array([s.table for s in shapes], np.float32).T.copy()
    materials = np.array([s.material for s in shapes], np.int8)
    for hole in reversed(holes):
        _see_through(hole, ids, canvas, table, materials[hole.shape])
    place = _world(canvas, ids, table)
    blend, shade = _texture(canvas, ids, materials, table, place, clouds)
    shade *= 0.92 + 0.16 * clouds
    image = _color(canvas, ids, table, blend, shade, place[2], size)
    return _sensor(image, rng, finish), mask


def _key(shape: Shape) -> float:
    return shape.key


def _rasterize(shapes: list[Shape], size: tuple[int, int]) -> tuple[Ids, list[_Hole]]:
    with extra("images"):
        from PIL import Image, ImageDraw

    height, width = size
    picture = Image.new("I", (width, height))
    draw = ImageDraw.Draw(picture)
    holes = []
    for i, (_, relative, _, material, table) in enumerate(shapes):
        points = [(x * width - 0.5, y * height - 0.5) for x, y in relative]
        if material in _SEE_THROUGH and (material != sc.FOLIAGE or table[9] > 0):
            xs, ys = [p[0] for p in points], [p[1] for p in points]
            left, top = max(int(min(xs)), 0), max(int(min(ys)), 0)
            right, bottom = min(int(max(xs)) + 2, width), min(int(max(ys)) + 2, height)
            if left < right and top < bottom:
                under = np.asarray(picture.crop((left, top, right, bottom)))
                holes.append(_Hole(i, left, top, under))
        draw.polygon(points, fill=i)
    return np.array(picture, np.intp), holes


def _rays(canvas: Canvas, size: tuple[int, int], box: tuple[int, int, int, int]) -> tuple[Floats, Floats]:
    """Return the slopes dX/dZ (1, w) and -dY/dZ (h, 1) for the pixels in a (left, top, right, bottom) box."""
    focal, vx, vy, _ = canvas.camera
    height, width = size
    across = (np.arange(box[0], box[2], dtype=np.float32) + 0.5) / width - vx
    down = (np.arange(box[1], box[3], dtype=np.float32) + 0.5) / height - vy
    return (across / focal).astype(np.float32)[None], (down / (2 * focal)).astype(np.float32)[:, None]


def _see_through(hole: _Hole, ids: Ids, canvas: Canvas, table: Floats, material: int) -> None:
    """Set the pixels in the gaps of a fence, wheel or tree to the id of the shape behind it."""
    height, width = hole.under.shape
    region = ids[hole.top : hole.top + height, hole.left : hole.left + width]
    a, b, c = table[:3, hole.shape]
    dx, dy = _rays(canvas, (ids.shape[0], ids.shape[1]),
                   (hole.left, hole.top, hole.left + width, hole.top + height))  # fmt: skip
    z = 1 / np.maximum(a * dx + b * dy + c, 1e-3)
    s, y = dx * z + z, canvas.camera.height - dy * z
    p = table[9:13, hole.shape]
    if material == sc.FOLIAGE:
        open_ = noise(s * 70 + p[1] * 5, y * 70, True) > 2.1 - 4 * p[0]
    elif material == sc.SPOKES:
        open_ = noise(s * 90, y * 90) > -0.4
    else:
        open_ = between_bars(s, y, p)
    np.copyto(region, hole.under, where=open_ & (region == hole.shape))


def _world(canvas: Canvas, ids: Ids, table: Floats) -> tuple[Floats, Floats, Floats]:
    """Return X, Y and Z, in meters, of the surface that is visible at each pixel."""
    dx, dy = _rays(canvas, (ids.shape[0], ids.shape[1]), (0, 0, ids.shape[1], ids.shape[0]))
    inverse = table[0].take(ids) * dx
    inverse += table[1].take(ids) * dy
    inverse += table[2].take(ids)
    z = 1 / np.maximum(inverse, 1e-3)
    return dx * z, canvas.camera.height - dy * z, z


def _texture(
    canvas: Canvas, ids: Ids, materials: NDArray[np.int8], table: Floats,
    place: tuple[Floats, Floats, Floats], clouds: Floats,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Return the weight of the second color and the brightness of each pixel."""
    blend, shade = np.zeros(ids.shape, np.float32), np.ones(ids.shape, np.float32)
    flat_ids, material = ids.ravel(), materials.take(ids.ravel())
    x, y, z = (part.ravel() for part in place)
    per_meter = canvas.camera.focal * ids.shape[1]
    for number, paint in PAINTS.items():
        at = np.flatnonzero(material == number)
        if not at.size:
            continue
        mine = flat_ids.take(at)
        px, py, pz = x.take(at), y.take(at), z.take(at)
        p0, p1, p2, p3 = (row.take(mine) for row in table[9:13])
        pixels = Pixels(px, py, pz, px + pz, pz / per_meter, (p0, p1, p2, p3))
        blend.ravel()[at], shade.ravel()[at] = paint(pixels, canvas)
    _sky(blend, ids, materials, table, canvas, clouds)
    return blend, shade


def _sky(
    blend: Floats, ids: Ids, materials: NDArray[np.int8], table: Floats, canvas: Canvas, clouds: Floats
) -> None:
    down = np.arange(ids.shape[0], dtype=np.float32)[:, None] / (ids.shape[0] * canvas.camera.vy)
    cover = table[9, 0]
    sky = np.clip(down * down * 0.8 + np.clip((clouds + cover - 0.45) * 2.5, 0, 1), 0, 1)
    np.copyto(blend, sky, where=(materials == sc.SKY).take(ids))


def _cloud(rng: np.random.Generator, size: tuple[int, int]) -> Floats:
    """Return smooth noise from 0 to 1 over the image, computed from grids that do not depend on the image size."""
    with extra("images"):
        from PIL import Image

    total = np.zeros(size, np.float32)
    for cells, weight in ((4, 0.5), (10, 0.3), (26, 0.2)):
        grid = Image.fromarray(rng.integers(0, 256, (cells, cells), np.uint8))
        total += np.asarray(grid.resize((size[1], size[0]), Image.Resampling.BICUBIC)) * np.float32(
            weight / 255
        )
    return total


def _color(
    canvas: Canvas, ids: Ids, table: Floats, blend: Floats, shade: Floats, z: Floats, size: tuple[int, int]
) -> NDArray[np.uint8]:
    """Blend the two colors of each shape, and apply light and haze."""
    light = canvas.light
    haze = z / (z + np.float32(light.reach))
    image = np.empty((*size, 3), np.uint8)
    for channel in range(3):
        first, second = table[3 + channel], table[6 + channel]
        value = (second - first).take(ids)
        value *= blend
        value += first.take(ids)
        value *= shade
        value += (np.float32(light.haze[channel]) - value) * haze
        value *= np.float32(255 * light.tint[channel])
        # Compress highlights smoothly instead of clipping them.
        image[..., channel] = np.clip(value * (1.25 - value * np.float32(0.25 / 255)), 0, 255)
    return image


def _sensor(
    image: NDArray[np.uint8], rng: np.random.Generator, finish: NDArray[np.float64]
) -> NDArray[np.uint8]:
    """Blur the image slightly, as a lens does, and add sensor noise."""
    with extra("images"):
        from PIL import Image, ImageFilter

    radius = float(0.3 + 0.35 * finish[0]) * max(1.0, image.shape[1] / 1400)
    soft = np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(radius))).astype(np.int16)
    strength = 2 + int(finish[1] * finish[1] * 9)
    soft += rng.integers(0, strength, image.shape, np.int16)
    soft -= rng.integers(0, strength, image.shape, np.int16)
    return np.clip(soft, 0, 255).astype(np.uint8)
