"""The shapes of a street scene: polygons projected from world coordinates to relative image coordinates.

A `Canvas` is independent of the image size. World coordinates are in meters: X points right, Y points up from the
ground, and Z points forward from the camera.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

__all__ = ["Camera", "Canvas", "Color", "Light", "Point", "Shape", "random_color", "tint"]

Color = tuple[float, float, float]
Point = tuple[float, float]
Four = tuple[float, float, float, float]

# Materials: textures that the renderer draws inside a polygon.
PLAIN, GLASS, FACADE, BRICK, ASPHALT, PAVING, GRASS, FOLIAGE, BARS, SKY, SPOKES = range(11)

# Layers are painted in this order. Within a layer, distant shapes are painted first.
BACKDROP, GROUND, SIDES, OBJECTS, EGO = range(5)

NOTHING: Four = (0.0, 0.0, 0.0, 0.0)
_FAR = 1000.0


class Camera(NamedTuple):
    """A pinhole camera above the ground: focal length in image widths, vanishing point, height in meters."""

    focal: float
    vx: float
    vy: float
    height: float


class Light(NamedTuple):
    """The light of a scene: brightness factors, RGB colors (0 to 1), and `reach`, the distance in meters
    at which an object's color is half haze."""

    sun_side: int
    left: float
    right: float
    facing: float
    top: float
    tint: Color
    haze: Color
    reach: float
    dusk: bool


class Shape(NamedTuple):
    """A polygon on a plane with the coefficients (a, b, c).

    At a pixel whose ray has the slopes dx = X / Z and dy = (camera height - Y) / Z, the depth Z of the plane satisfies
    `1 / Z = a * dx + b * dy + c`.
    """

    key: float
    points: list[Point]
    cls: int
    material: int
    attributes: tuple[float, ...]  # plane (3), color (3), second color (3), parameters of the material (4)


class Canvas:
    """A list of shapes. `set_layer` sets the painting order of subsequent shapes."""

    def __init__(self, camera: Camera, light: Light) -> None:
        self.camera = camera
        self.light = light
        self.shapes: list[Shape] = []
        self._key = 0.0
        self._depth = _FAR

    def set_layer(self, layer: int, z: float) -> None:
        """Paint subsequent shapes in `layer`, before all shapes of this layer that are nearer than `z` meters."""
        self._key = layer * _FAR * 2 - z
        self._depth = z

    def point(self, x: float, y: float, z: float) -> Point:
        """Return the position of a world point in relative image coordinates (from 0 to 1 inside the image)."""
        focal, vx, vy, height = self.camera
        z = max(z, 0.4)
        return vx + focal * x / z, vy + 2.0 * focal * (height - y) / z

    def add(
        self,
        points: list[Point],
        cls: int,
        color: Color,
        material: int = PLAIN,
        second: Color | None = None,
        params: Four = NOTHING,
        plane: tuple[float, float, float] | None = None,
    ) -> None:
        """Add a polygon of image points. By default, the polygon is upright at the current depth."""
        plane = plane or (0.0, 0.0, 1.0 / self._depth)
        second = second or (color[0] * 0.6, color[1] * 0.58, color[2] * 0.55)
        self.shapes.append(Shape(self._key, points, cls, material, plane + color + second + params))

    def ground(
        self,
        x: tuple[float, float],
        z: tuple[float, float],
        cls: int,
        color: Color,
        material: int,
        second: Color | None = None,
        params: Four = NOTHING,
    ) -> None:
        """Add a rectangle on the ground."""
        point = self.point
        points = [point(x[0], 0, z[0]), point(x[1], 0, z[0]), point(x[1], 0, z[1]), point(x[0], 0, z[1])]
        self.add(points, cls, color, material, second, params, (0.0, 1.0 / self.camera.height, 0.0))

    def ground_octagon(
        self, x: float, z: float, rx: float, rz: float, cls: int, color: Color, material: int
    ) -> None:
        """Add an octagon on the ground, such as a shadow, a patch or a manhole cover."""
        ring = [self.point(x + rx * u, 0, z + rz * v) for u, v in _OCTAGON]
        self.add(ring, cls, color, material, plane=(0.0, 1.0 / self.camera.height, 0.0))

    def side(
        self,
        x: float,
        z: tuple[float, float],
        y: tuple[float, float],
        cls: int,
        color: Color,
        material: int,
        second: Color | None = None,
        params: Four = NOTHING,
    ) -> None:
        """Add an upright rectangle along the street, in the plane X = `x`."""
        point = self.point
        points = [point(x, y[0], z[0]), point(x, y[1], z[0]), point(x, y[1], z[1]), point(x, y[0], z[1])]
        self.add(points, cls, color, material, second, params, (1.0 / x, 0.0, 0.0))

    def front(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        z: float,
        cls: int,
        color: Color,
        material: int = PLAIN,
        second: Color | None = None,
        params: Four = NOTHING,
    ) -> None:
        """Add an upright rectangle that faces the camera, in the plane Z = `z`."""
        left, bottom = self.point(x[0], y[0], z)
        right, top = self.point(x[1], y[1], z)
        points = [(left, bottom), (left, top), (right, top), (right, bottom)]
        self.add(points, cls, color, material, second, params, (0.0, 0.0, 1.0 / max(z, 0.4)))

    def limb(self, a: Point, b: Point, wa: float, wb: float, cls: int, color: Color) -> None:
        """Add a bar from image point `a` to `b` with widths `wa` and `wb` (in meters at the current depth)."""
        scale = self.camera.focal / self._depth / 2
        ux, uy = b[0] - a[0], (b[1] - a[1]) / 2
        length = (ux * ux + uy * uy) ** 0.5 or 1e-9
        nx, ny = -uy / length * scale, 2 * ux / length * scale
        points = [
            (a[0] + nx * wa, a[1] + ny * wa),
            (b[0] + nx * wb, b[1] + ny * wb),
            (b[0] - nx * wb, b[1] - ny * wb),
            (a[0] - nx * wa, a[1] - ny * wa),
        ]
        self.add(points, cls, color)

    def disc(
        self, center: Point, radius: float, cls: int, color: Color, ring: Sequence[Point] | None = None
    ) -> None:
        """Add a disc (or the outline `ring`), scaled to `radius` meters, around an image point at the current depth."""
        s = self.camera.focal / self._depth * radius
        cx, cy = center
        self.add([(cx + u * s, cy + 2 * v * s) for u, v in ring or _OCTAGON], cls, color)


_OCTAGON = [(1, 0.41), (0.41, 1), (-0.41, 1), (-1, 0.41), (-1, -0.41), (-0.41, -1), (0.41, -1), (1, -0.41)]


def tint(color: Color, factor: float) -> Color:
    """Return the color with its brightness multiplied by `factor`."""
    return color[0] * factor, color[1] * factor, color[2] * factor


def _gray(r: Random) -> Color:
    v = r.uniform(0.1, 0.88)
    return v * r.uniform(0.94, 1.06), v, v * r.uniform(0.92, 1.08)


def _earth(r: Random) -> Color:
    v = r.uniform(0.25, 0.9)
    return v, v * r.uniform(0.6, 0.92), v * r.uniform(0.35, 0.8)


def _green(r: Random) -> Color:
    v = r.uniform(0.18, 0.55)
    return v * r.uniform(0.45, 1.0), v, v * r.uniform(0.25, 0.7)


def _bright(r: Random) -> Color:
    low, mid, high = r.uniform(0.03, 0.3), r.uniform(0.1, 0.6), r.uniform(0.4, 0.9)
    parts = [low, mid, high]
    r.shuffle(parts)
    dull = r.random() * 0.7
    red, green, blue = (part + (mid - part) * dull for part in parts)
    return red, green, blue


def random_color(r: Random, gray: float, earth: float, green: float) -> Color:
    """Return a random color: gray, earth or green with the given probabilities, and bright in all other cases.

    All classes use the same colors, so colors provide little information about the class.
    """
    family = r.random()
    if family < gray:
        return _gray(r)
    if family < gray + earth:
        return _earth(r)
    return _green(r) if family < gray + earth + green else _bright(r)
