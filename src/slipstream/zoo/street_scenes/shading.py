"""Render the shapes of a canvas: rasterize shape ids, then compute textures from the world position of each pixel."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.extras import extra
from slipstream.zoo.street_scenes import canvas as sc
from slipstream.zoo.street_scenes.canvas import Canvas, Shape
from slipstream.zoo.street_scenes.textures import TEXTURES, Floats, Pixels, between_bars, noise

__all__ = ["render"]

Ids = NDArray[np.intp]
_TRANSPARENT = (sc.BARS, sc.SPOKES, sc.FOLIAGE)


class _TransparentShape(NamedTuple):
    """A partly transparent shape: its id, the top-left corner of its bounding box, and the ids behind it in the box."""

    shape: int
    left: int
    top: int
    covered_ids: Ids


def render(
    canvas: Canvas, size: tuple[int, int], rng: np.random.Generator
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the image (H, W, 3) and the class map (H, W) of a canvas, both uint8."""
    shapes = sorted(canvas.shapes, key=_key)
    clouds, sensor_params = _cloud(rng, size), rng.random(2)
    ids, transparent = _rasterize(shapes, size)
    mask = np.array([s.cls for s in shapes], np.uint8).take(ids)
    table = np.array([s.attributes for s in shapes], np.float32).T.copy()
    materials = np.array([s.material for s in shapes], np.int8)
    for item in reversed(transparent):
        _fill_gaps(item, ids, canvas, table, materials[item.shape])
    positions = _world_positions(canvas, ids, table)
    blend, shade = _texture(canvas, ids, materials, table, positions, clouds)
    shade *= 0.92 + 0.16 * clouds
    image = _color(canvas, ids, table, blend, shade, positions[2], size)
    return _sensor(image, rng, sensor_params), mask


def _key(shape: Shape) -> float:
    return shape.key


def _rasterize(shapes: list[Shape], size: tuple[int, int]) -> tuple[Ids, list[_TransparentShape]]:
    with extra("images"):
        from PIL import Image, ImageDraw

    height, width = size
    id_image = Image.new("I", (width, height))
    draw = ImageDraw.Draw(id_image)
    transparent = []
    for i, (_, relative_points, _, material, attributes) in enumerate(shapes):
        points = [(x * width - 0.5, y * height - 0.5) for x, y in relative_points]
        if material in _TRANSPARENT and (material != sc.FOLIAGE or attributes[9] > 0):
            xs, ys = [p[0] for p in points], [p[1] for p in points]
            left, top = max(int(min(xs)), 0), max(int(min(ys)), 0)
            right, bottom = min(int(max(xs)) + 2, width), min(int(max(ys)) + 2, height)
            if left < right and top < bottom:
                covered_ids = np.asarray(id_image.crop((left, top, right, bottom)))
                transparent.append(_TransparentShape(i, left, top, covered_ids))
        draw.polygon(points, fill=i)
    return np.array(id_image, np.intp), transparent


def _rays(canvas: Canvas, size: tuple[int, int], box: tuple[int, int, int, int]) -> tuple[Floats, Floats]:
    """Return the slopes dX/dZ (1, w) and -dY/dZ (h, 1) for the pixels in a (left, top, right, bottom) box."""
    focal, vx, vy, _ = canvas.camera
    height, width = size
    x = (np.arange(box[0], box[2], dtype=np.float32) + 0.5) / width - vx
    y = (np.arange(box[1], box[3], dtype=np.float32) + 0.5) / height - vy
    return (x / focal).astype(np.float32)[None], (y / (2 * focal)).astype(np.float32)[:, None]


def _fill_gaps(item: _TransparentShape, ids: Ids, canvas: Canvas, table: Floats, material: int) -> None:
    """Set the pixels in the gaps of a fence, wheel or tree to the id of the shape behind it."""
    height, width = item.covered_ids.shape
    region = ids[item.top : item.top + height, item.left : item.left + width]
    a, b, c = table[:3, item.shape]
    dx, dy = _rays(canvas, (ids.shape[0], ids.shape[1]),
                   (item.left, item.top, item.left + width, item.top + height))  # fmt: skip
    z = 1 / np.maximum(a * dx + b * dy + c, 1e-3)
    s, y = dx * z + z, canvas.camera.height - dy * z
    params = table[9:13, item.shape]
    if material == sc.FOLIAGE:
        gaps = noise(s * 70 + params[1] * 5, y * 70, True) > 2.1 - 4 * params[0]
    elif material == sc.SPOKES:
        gaps = noise(s * 90, y * 90) > -0.4
    else:
        gaps = between_bars(s, y, params)
    np.copyto(region, item.covered_ids, where=gaps & (region == item.shape))


def _world_positions(canvas: Canvas, ids: Ids, table: Floats) -> tuple[Floats, Floats, Floats]:
    """Return X, Y and Z, in meters, of the surface that is visible at each pixel."""
    dx, dy = _rays(canvas, (ids.shape[0], ids.shape[1]), (0, 0, ids.shape[1], ids.shape[0]))
    inverse = table[0].take(ids) * dx
    inverse += table[1].take(ids) * dy
    inverse += table[2].take(ids)
    z = 1 / np.maximum(inverse, 1e-3)
    return dx * z, canvas.camera.height - dy * z, z


def _texture(
    canvas: Canvas, ids: Ids, materials: NDArray[np.int8], table: Floats,
    positions: tuple[Floats, Floats, Floats], clouds: Floats,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Return the weight of the second color and the brightness of each pixel."""
    blend, shade = np.zeros(ids.shape, np.float32), np.ones(ids.shape, np.float32)
    flat_ids, material = ids.ravel(), materials.take(ids.ravel())
    x, y, z = (part.ravel() for part in positions)
    per_meter = canvas.camera.focal * ids.shape[1]
    for material_id, texture in TEXTURES.items():
        selected = np.flatnonzero(material == material_id)
        if not selected.size:
            continue
        selected_ids = flat_ids.take(selected)
        px, py, pz = x.take(selected), y.take(selected), z.take(selected)
        p0, p1, p2, p3 = (row.take(selected_ids) for row in table[9:13])
        pixels = Pixels(px, py, pz, px + pz, pz / per_meter, (p0, p1, p2, p3))
        blend.ravel()[selected], shade.ravel()[selected] = texture(pixels, canvas)
    _sky(blend, ids, materials, table, canvas, clouds)
    return blend, shade


def _sky(
    blend: Floats, ids: Ids, materials: NDArray[np.int8], table: Floats, canvas: Canvas, clouds: Floats
) -> None:
    y = np.arange(ids.shape[0], dtype=np.float32)[:, None] / (ids.shape[0] * canvas.camera.vy)
    cover = table[9, 0]
    sky = np.clip(y * y * 0.8 + np.clip((clouds + cover - 0.45) * 2.5, 0, 1), 0, 1)
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
    image: NDArray[np.uint8], rng: np.random.Generator, sensor_params: NDArray[np.float64]
) -> NDArray[np.uint8]:
    """Blur the image slightly, as a lens does, and add sensor noise."""
    with extra("images"):
        from PIL import Image, ImageFilter

    radius = float(0.3 + 0.35 * sensor_params[0]) * max(1.0, image.shape[1] / 1400)
    soft = np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(radius))).astype(np.int16)
    strength = 2 + int(sensor_params[1] * sensor_params[1] * 9)
    soft += rng.integers(0, strength, image.shape, np.int16)
    soft -= rng.integers(0, strength, image.shape, np.int16)
    return np.clip(soft, 0, 255).astype(np.uint8)
