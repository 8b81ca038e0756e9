"""Layout of a street scene: polygons in world coordinates, projected to relative image coordinates.

World coordinates are in meters: X points right, Y points up from the ground, and Z points forward from the camera. A
`Scene` does not depend on the image size.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

Color = tuple[float, float, float]
Span = tuple[float, float]
World = tuple[float, float, float]

# Materials, whose textures the renderer computes.
PLAIN, GLASS, FACADE, BRICK, PICKETS, ASPHALT, PAVING, GRASS, LEAVES, SKY = range(10)
# Layers are painted in this order, and distant shapes of a layer are painted first.
BACKDROP, GROUND, SIDES, OBJECTS, HOOD = range(5)
(ROAD, SIDEWALK, BUILDING, WALL, FENCE, POLE, LIGHT, SIGN, VEGETATION, TERRAIN, SKY_CLASS, PERSON, RIDER, CAR, TRUCK,
 BUS, TRAIN, MOTORCYCLE, BICYCLE) = range(19)  # fmt: skip
VOID = 255

BLACK, GRAY, WHITE = (0.05, 0.05, 0.055), (0.4, 0.4, 0.42), (0.9, 0.9, 0.88)
RED, BLUE, YELLOW, GREEN = (0.78, 0.07, 0.08), (0.06, 0.2, 0.62), (0.93, 0.72, 0.08), (0.1, 0.75, 0.4)
LEAF_HUES, EARTH_HUES = (0.17, 0.36), (0.02, 0.14)
CIRCLE = [(math.cos(math.pi * (i + 0.5) / 5), math.sin(math.pi * (i + 0.5) / 5)) for i in range(10)]
SIGNS = (CIRCLE, CIRCLE, [(0, 1.15), (1.1, -0.75), (-1.1, -0.75)], [(0, -1.2), (1.2, 0), (0, 1.2), (-1.2, 0)],
         [(-2.2, -1.2), (2.2, -1.2), (2.2, 1.2), (-2.2, 1.2)])  # fmt: skip

# Figures: bars as (part, X and Y of both ends, widths at both ends).
_Bars = tuple[tuple[str, float, float, float, float, float, float], ...]
_PERSON: _Bars = (
    ("legs", -0.09, 0.92, -0.2, 0.06, 0.2, 0.1), ("legs", 0.09, 0.92, 0.22, 0.06, 0.2, 0.1),
    ("arms", -0.2, 1.42, -0.3, 0.88, 0.14, 0.08), ("top", 0.02, 1.47, 0.0, 0.86, 0.42, 0.33),
    ("arms", 0.2, 1.42, 0.32, 0.88, 0.14, 0.08), ("skin", 0.02, 1.43, 0.03, 1.73, 0.11, 0.2),
    ("hair", 0.02, 1.66, 0.01, 1.77, 0.25, 0.16),
)  # fmt: skip
_RIDER: _Bars = (
    ("legs", -0.22, 0.98, 0.16, 0.6, 0.2, 0.15), ("legs", 0.16, 0.6, 0.0, 0.2, 0.14, 0.1),
    ("top", -0.22, 0.98, 0.02, 1.5, 0.32, 0.4), ("arms", 0.02, 1.43, 0.38, 1.1, 0.14, 0.09),
    ("skin", 0.05, 1.45, 0.08, 1.75, 0.11, 0.2), ("hair", 0.08, 1.68, 0.08, 1.82, 0.27, 0.18),
)  # fmt: skip
_BICYCLE: _Bars = (
    ("top", -0.2, 0.92, -0.05, 0.3, 0.06, 0.06), ("top", -0.05, 0.3, 0.38, 0.85, 0.06, 0.06),
    ("top", 0.38, 0.85, -0.15, 0.78, 0.06, 0.06), ("top", -0.58, 0.35, -0.05, 0.3, 0.06, 0.06),
    ("top", 0.36, 1.05, 0.58, 0.35, 0.06, 0.06), ("dark", -0.33, 0.95, -0.08, 0.96, 0.09, 0.06),
)  # fmt: skip
_MOTORCYCLE: _Bars = (
    ("dark", -0.65, 0.35, 0.3, 0.42, 0.3, 0.34), ("top", -0.85, 0.72, -0.1, 0.66, 0.24, 0.4),
    ("dark", -0.8, 0.84, 0.05, 0.8, 0.14, 0.16), ("top", 0.45, 0.25, 0.5, 1.0, 0.3, 0.3),
)  # fmt: skip


class Shape(NamedTuple):
    """A polygon with a class and a material.

    The attributes are the plane (a, b, c), two colors and four parameters of the material. At a pixel whose ray has
    the slopes dx = X / Z and dy = (camera height - Y) / Z, the plane has `1 / Z = a * dx + b * dy + c`.
    """

    key: float
    points: list[Span]
    cls: int
    material: int
    attributes: tuple[float, ...]


class Scene:
    """A random scene: its camera (focal length in image widths, vanishing point, height), its light and its shapes."""

    def __init__(self, r: Random) -> None:
        self.r = r
        self.focal, self.height = r.uniform(0.7, 1.0), r.uniform(1.2, 1.75)
        self.vx, self.vy = r.gauss(0.5, 0.07), r.uniform(0.36, 0.47)
        self.sun, self.dusk = r.choice((-1, 0, 1)), r.random() < 0.1
        sunny, shady = (r.uniform(1.1, 1.35), r.uniform(0.5, 0.75)) if self.sun else (0.95, 0.95)
        self.lights = {0: 1.0, 1: sunny if self.sun < 0 else shady, -1: sunny if self.sun > 0 else shady}
        gain, warm = r.uniform(0.35, 0.5) if self.dusk else r.uniform(0.7, 1.25), r.uniform(-0.1, 0.1)
        self.tint = (gain * (1 + warm), gain, gain * (1 - warm))
        haze = r.choice(((0.8, 0.84, 0.9), (0.86, 0.86, 0.86), (0.92, 0.86, 0.76)))
        self.haze, self.reach = (
            _tint(haze, 0.55 if self.dusk else 1.0),
            r.choice((110.0, 250.0, 500.0, 900.0)),
        )
        self.shapes: list[Shape] = []
        left = -r.choice((2.0, 4.8, 5.2, 8.2)) - r.choice((0.3, 2.3))
        right = r.uniform(1.7, 2.3) + r.choice((0.2, 2.3, 5.0))
        edges = (left - r.uniform(2, 6), right + r.uniform(2, 6))
        self._backdrop()
        self._ground(left, right, edges)
        for sign, curb, edge in ((-1, left, edges[0]), (1, right, edges[1])):
            self._houses(sign, edge)
            self._sidewalk(sign, curb, edge)
        self._traffic(left, right)

    def _layer(self, layer: int, z: float) -> None:
        """Paint the next shapes in `layer`, before its shapes that are nearer than `z` meters."""
        self._key = layer * 2000 - z

    def _face(self, corners: Sequence[World], cls: int, color: Color, material: int = PLAIN,
              second: Color | None = None, *params: float) -> None:  # fmt: skip
        """Add a flat polygon. `second` is the color that the texture blends in."""
        (x0, y0, z0), (x1, y1, z1), (x2, y2, z2) = (corners[i * len(corners) // 3] for i in range(3))
        nx = (y1 - y0) * (z2 - z0) - (z1 - z0) * (y2 - y0)
        ny = (z1 - z0) * (x2 - x0) - (x1 - x0) * (z2 - z0)
        nz = (x1 - x0) * (y2 - y0) - (y1 - y0) * (x2 - x0)
        d = nx * x0 + ny * y0 + nz * z0 - ny * self.height
        plane = (nx / d, -ny / d, nz / d) if abs(d) > 1e-6 else (0.0, 0.0, 1 / z0)
        points = []
        for x, y, z in corners:
            scale = self.focal / max(z, 0.4)
            points.append((self.vx + scale * x, self.vy + 2 * scale * (self.height - y)))
        attributes = (*plane, *color, *(second or _tint(color, 0.58)), *params, *(0.0,) * (4 - len(params)))
        self.shapes.append(Shape(self._key, points, cls, material, attributes))

    def _rect(self, x: Span, y: Span, z: Span, cls: int, color: Color, *style: Any) -> None:
        """Add an axis-parallel rectangle. One of its three spans has length 0."""
        on_ground = y[0] == y[1]
        corners = [(x[i], y[j], z[j if on_ground else i]) for i, j in ((0, 0), (1, 0), (1, 1), (0, 1))]
        self._face(corners, cls, color, *style)

    def _bar(self, z: float, a: Span, b: Span, widths: Span, cls: int, color: Color) -> None:
        """Add a bar at depth `z` from (X, Y) point `a` to `b`."""
        dx, dy = b[0] - a[0], b[1] - a[1]
        half = 0.5 / (math.hypot(dx, dy) or 1.0)
        ends = ((a, widths[0]), (b, widths[1]), (b, -widths[1]), (a, -widths[0]))
        self._face([(p[0] - dy * half * w, p[1] + dx * half * w, z) for p, w in ends], cls, color)

    def _disc(self, center: World, radius: Span, outline: Sequence[Span], cls: int, *style: Any) -> None:
        x, y, z = center
        self._face([(x + radius[0] * u, y + radius[1] * v, z) for u, v in outline], cls, *style)

    def _color(self, gray: float, hue: Span = (0.0, 1.0)) -> Color:
        """Return a random color, which is a gray with probability `gray`. All classes have similar colors."""
        saturation = self.r.uniform(0, 0.1) if self.r.random() < gray else self.r.uniform(0.15, 0.75)
        return colorsys.hsv_to_rgb(self.r.uniform(*hue), saturation, self.r.uniform(0.15, 0.85))

    def _leaf_colors(self) -> tuple[Color, Color]:
        """Return the light and the dark color of a plant: usually green, sometimes autumnal."""
        light = self._color(0.1, LEAF_HUES if self.r.random() < 0.75 else EARTH_HUES)
        return _tint(light, 0.75), _tint(light, 0.2)

    def _positions(self, start: float, stop: float, step: Span, probability: float = 1.0) -> Iterator[float]:
        """Yield random depths, whose spacing grows with the distance."""
        z = start + self.r.uniform(0, step[1] / 2)
        while z < stop:
            if self.r.random() < probability:
                self._layer(OBJECTS, z)
                yield z
            z += self.r.uniform(*step) * (1 + z / 60)

    def _backdrop(self) -> None:
        """Add the sky, a skyline, and usually the hood of the car that carries the camera, which metrics ignore."""
        r = self.r
        self._layer(BACKDROP, 950)
        zenith = r.choice(((0.25, 0.48, 0.85), (0.42, 0.6, 0.85), (0.7, 0.73, 0.78)))
        style: tuple[Any, ...] = (
            _tint(zenith, 0.5 if self.dusk else 1),
            SKY,
            self.haze,
            r.uniform(-0.4, 0.6),
        )
        self._rect((-3e3, 3e3), (-2e3, 3e3), (900, 900), SKY_CLASS, *style)
        for _ in range(r.randint(3, 7)):
            x, wall = r.uniform(-120, 120), self._color(0.5, EARTH_HUES)
            span, style = (
                (x, x + r.uniform(8, 30)),
                (wall, FACADE, _tint(wall, 0.4), 3.0, 3.2, 0.5, r.random()),
            )
            self._rect(span, (0, r.uniform(8, 40)), (260, 260), BUILDING, *style)
        tops, (light, dark) = [(x, r.uniform(2, 9), 200.0) for x in range(-200, 201, 5)], self._leaf_colors()
        self._face([(-200, -1, 200), *tops, (200, -1, 200)], VEGETATION, light, LEAVES, dark, 9.0, 4.0, 4.0)
        if r.random() < 0.75:
            self._layer(HOOD, 1)
            y, color = (
                self.height - r.uniform(0.9, 0.97) / self.focal / 3.4,
                _tint(WHITE, r.uniform(0.05, 0.4)),
            )
            arc = [(u / 2, y - 0.02 * u * u, 1.0) for u in range(-4, 5)]
            self._face([*arc, (2, -2, 1.0), (-2, -2, 1.0)], VOID, color, PLAIN, _tint(color, 1.8))

    def _ground(self, left: float, right: float, edges: Span) -> None:
        """Lay the terrain, the sidewalks with strips of grass, and the road with its markings."""
        r, flat, depth = self.r, (0.0, 0.0), (1.0, 900.0)
        self._layer(GROUND, 900)
        grass = (self._color(0.1, LEAF_HUES), GRASS, _tint(self._color(0.2, EARTH_HUES), 0.8))
        paving, slab = self._color(0.9, EARTH_HUES), r.choice((0.3, 0.5, 1.0))
        self._rect((-400, 400), flat, depth, TERRAIN, *grass)
        self._rect(edges, flat, depth, SIDEWALK, paving, PAVING, None, slab)
        for x in (left - r.uniform(1.2, 1.8), right):
            if r.random() < 0.5:
                self._rect((x, x + 1.8), flat, depth, TERRAIN, *grass)
        self._rect((left - 0.16, right + 0.16), flat, depth, SIDEWALK, _tint(paving, 1.25), PAVING, None, 1.0)
        lanes = (r.uniform(1.55, 1.85), r.uniform(3.1, 3.5), r.choice((0.0, 0.0, 1.0)), r.uniform(0.3, 1.0))
        self._rect((left, right), flat, depth, ROAD, _tint(self._color(1.0), 0.55), ASPHALT, WHITE, *lanes)

    def _houses(self, sign: int, x: float) -> None:
        """Build houses, walls, fences and hedges along one side of the street."""
        r, light, z = self.r, self.lights[sign], 2.0
        weights = r.choice(((8, 1, 1, 1), (4, 2, 2, 2), (2, 2, 3, 4)))
        while z < 150:
            span, end = (x, x), z + r.uniform(7, 18) * (1 + z / 90)
            kind = r.choices((BUILDING, WALL, FENCE, VEGETATION), weights)[0]
            self._layer(SIDES, z)
            for _ in range(r.randint(1, 5) if kind != BUILDING else 0):
                center = (x + sign * r.uniform(2, 5), r.uniform(1.5, 4.5), r.uniform(z, end) + 2)
                self._bush(center, r.uniform(1.4, 3.2), self._leaf_colors())
            paint, height = self._color(0.5, EARTH_HUES), (0, r.uniform(1.0, 2.6))
            if kind == BUILDING:
                self._house(sign, x, (z, end))
            elif kind == WALL:
                style: tuple[Any, ...] = (BRICK, None, r.choice((0.12, 0.25, 0.5)))
                self._rect((x, x + sign / 2), height, (z, z), WALL, _tint(paint, 0.7), *style)
                self._rect(span, height, (z, end), WALL, _tint(paint, light), *style)
            elif kind == FENCE:
                style = (PICKETS, _tint(self._leaf_colors()[0], 0.3), r.uniform(0.12, 0.25))
                self._rect(span, height, (z, end), FENCE, _tint(paint, light), *style)
            else:
                leaf, dark = self._leaf_colors()
                top = [(x, height[1] * r.uniform(0.85, 1.1), z + (end - z) * i / 10) for i in range(11)]
                self._face(
                    [(x, 0, z), *top, (x, 0, end)], VEGETATION, leaf, LEAVES, dark, 7.0, 1.0, height[1]
                )
            z = end

    def _house(self, sign: int, x: float, z: Span) -> None:
        r, light, height = self.r, self.lights[sign], self.r.uniform(6, 20)
        paint = self._color(0.4, r.choice((EARTH_HUES, EARTH_HUES, (0, 1))))
        glass = YELLOW if self.dusk else _tint(BLUE, r.uniform(0.2, 0.6))
        style = (FACADE, glass, r.uniform(1.6, 3.4), r.uniform(2.9, 3.9), r.uniform(0.35, 0.68), r.random())
        if r.random() < 0.6:
            tiles, ridge = self._color(0.4, EARTH_HUES), (x + sign * 4, height + r.uniform(2.5, 4.5))
            gable = [(x, height, z[0]), (*ridge, z[0]), (x + sign * 8, height, z[0])]
            self._face(gable, BUILDING, _tint(tiles, 0.75), BRICK, None, 0.4)
            slope = [(x, height, z[0]), (x, height, z[1]), (*ridge, z[1]), (*ridge, z[0])]
            self._face(slope, BUILDING, tiles, BRICK, None, 0.45)
        front = (x, x + sign * r.uniform(7, 14))
        self._rect(front, (0, height), (z[0], z[0]), BUILDING, _tint(paint, 0.75), *style)
        self._rect((x, x), (0, height), z, BUILDING, _tint(paint, light), *style)
        self._rect((x, x), (0, 0.7), z, BUILDING, _tint(paint, light * 0.6), BRICK, None, 0.3)
        if r.random() < 0.4:  # a shop with its sign
            self._rect((x, x), (0.5, 2.5), (z[0] + 1, z[1] - 1), BUILDING, glass, GLASS, self.haze)
            self._rect((x, x), (2.6, 3.2), z, BUILDING, _tint(self._color(0.2), light))

    def _bush(self, center: World, size: float, leaves: tuple[Color, Color]) -> None:
        """Draw an irregular cluster of leaves around a world point."""
        turns = [(i / 8 * math.pi, 0.72 + 0.42 * self.r.random()) for i in range(16)]
        outline = [(k * math.cos(t), k * math.sin(t)) for t, k in turns]
        style = (leaves[0], LEAVES, leaves[1], self.r.uniform(0, 50), center[1], size)
        self._disc(center, (size, size * 0.88), outline, VEGETATION, *style)

    def _sidewalk(self, sign: int, curb: float, edge: float) -> None:
        """Place trees, lamp posts, signs, traffic lights, bins, pedestrians and parked bicycles."""
        r, leaves, x = self.r, self._leaf_colors(), curb + sign * 0.7
        for z in self._positions(7, 75, (6, 12)) if r.random() < 0.6 else ():
            self._tree(x, z, leaves)
        for z in self._positions(7, 80, (8, 22)):
            metal, height = self._color(0.9), r.uniform(3.2, 9)
            self._bar(z, (x, 0), (x, height), (0.17, 0.14), POLE, metal)
            self._bar(z, (x, height), (x - sign * 2, height + 0.3), (0.14, 0.2), POLE, metal)
        for z in self._positions(7, 45, (8, 30)):
            height, size, outline = r.uniform(2.1, 3.1), r.uniform(0.32, 0.45), r.choice(SIGNS)
            self._bar(z, (x, 0), (x, height + 0.3), (0.1, 0.08), POLE, self._color(0.9))
            colors = r.choice(((RED, WHITE), (BLUE, WHITE), (RED, RED), (WHITE, YELLOW)))
            for color, scale in zip(colors, (size, size * 0.75), strict=True):
                self._disc((x, height, z), (scale, scale), outline, SIGN, color)
            self._bar(z, (x - 0.15, height), (x + 0.15, height), (0.1, 0.1), SIGN, colors[0])
        for z in self._positions(9, 60, (15, 50)):
            self._traffic_light(x - sign * 0.3, z, sign)
        for z in self._positions(8, 40, (10, 50)):
            u, paint = edge - sign * r.uniform(0.4, 0.9), self._color(0.6)
            self._rect((u - 0.35, u + 0.35), (0, 1), (z, z), VOID, paint)
            self._rect((u - 0.4, u + 0.4), (1, 1.12), (z, z), VOID, _tint(paint, 0.55))
        for z in self._positions(6, 55, (3, 9), r.choice((0.15, 0.5, 0.9))):
            self._person(r.uniform(curb + sign * 0.5, edge - sign * 0.4), z, SIDEWALK)
        for z in self._positions(6, 30, (6, 30)):
            self._cycle(edge - sign * r.uniform(0.6, 1.6), z, SIDEWALK)

    def _tree(self, x: float, z: float, leaves: tuple[Color, Color]) -> None:
        r, bark = self.r, _tint(self._color(0.4, EARTH_HUES), 0.4)
        height, stem, width = r.uniform(4, 9.5), r.uniform(1.6, 3), r.uniform(0.2, 0.45)
        self._bar(z, (x, 0), (x, height * 0.7), (width * 1.3, width * 0.6), VEGETATION, bark)
        for i in range(7):  # the lower clusters first, and darker
            y, spread = (
                (stem + height) / 2 + 0.3 + (i - 3) / 9 * (height - stem),
                r.uniform(0.32, 0.5) * height,
            )
            lit = (_tint(leaves[0], 0.62 + 0.09 * i), leaves[1])
            self._bush((x + r.uniform(-0.6, 0.6) * spread, y, z), spread * r.uniform(0.4, 0.7), lit)

    def _traffic_light(self, x: float, z: float, sign: int) -> None:
        r, metal = self.r, self._color(0.9)
        lit, arm = r.randrange(3), x - sign * r.uniform(2.2, 3.8)  # a second one hangs above the road
        self._bar(z, (x, 0), (x, 5.6), (0.17, 0.14), POLE, metal)
        self._bar(z, (x, 5.5), (arm, 5.6), (0.13, 0.1), POLE, metal)
        for u, y in ((x, 2.75), (arm, 5.0)):
            self._rect((u - 0.22, u + 0.22), (y - 0.58, y + 0.58), (z, z), LIGHT, _tint(metal, 0.4))
            for i, color in enumerate((RED, YELLOW, GREEN)):
                lamp = _tint(color, 1.5 if i == lit else 0.2)
                self._disc((u, y + 0.35 - 0.35 * i, z), (0.15, 0.15), CIRCLE, LIGHT, lamp)

    def _shadow(self, x: float, z: float, rx: float, rz: float, cls: int) -> None:
        corners = [(x + rx * u - 0.2 * self.sun, 0.0, max(z + rz * v, 1.0)) for u, v in CIRCLE]
        self._face(corners, cls, _tint(BLACK, 1.6), ASPHALT)

    def _figure(self, cls: int, x: float, z: float, bars: _Bars, scale: Span) -> None:
        """Draw bars at depth `z` in random colors, scaled horizontally (negative: mirrored) and vertically."""
        (u, v), r = scale, self.r
        colors = {part: _tint(self._color(0.6), r.uniform(0.4, 1)) for part in ("top", "legs", "hair")}
        skin = _tint((0.85, 0.62, 0.5), r.uniform(0.35, 1))
        colors |= {"arms": _tint(colors["top"], 0.8), "dark": BLACK, "skin": skin}
        for part, x0, y0, x1, y1, w0, w1 in bars:
            self._bar(z, (x + x0 * u, y0 * v), (x + x1 * u, y1 * v), (w0 * v, w1 * v), cls, colors[part])

    def _person(self, x: float, z: float, ground: int) -> None:
        self._shadow(x, z, 0.4, 0.25, ground)
        height = self.r.uniform(0.88, 1.1) if self.r.random() < 0.88 else self.r.uniform(0.55, 0.78)
        width = height * self.r.choice((-1, 1)) * self.r.uniform(0.6, 1.3)
        self._figure(PERSON, x, z, _PERSON, (width, height))

    def _cycle(self, x: float, z: float, ground: int) -> None:
        """Draw a bicycle or motorcycle from the side or at an angle, with a rider on the road."""
        u, motor = self.r.choice((-1, 1)) * self.r.choice((1, 0.85, 0.45)), self.r.random() < 0.35
        cls, bars, rim = (MOTORCYCLE, _MOTORCYCLE, 0.2) if motor else (BICYCLE, _BICYCLE, 0.28)
        self._shadow(x, z, 0.9 * abs(u), 0.3, ground)
        for center in (x - 0.58 * u, x + 0.58 * u):
            for radius, color in ((0.34, BLACK), (rim, GRAY)):
                self._disc((center, 0.34, z), (radius * u, radius), CIRCLE, cls, color)
        self._figure(cls, x, z, bars, (u, 1))
        if ground == ROAD:
            self._figure(RIDER, x, z, _RIDER, (u, 1))

    def _traffic(self, left: float, right: float) -> None:
        """Place parked and moving vehicles, riders, and in some scenes a tram and pedestrians on the road."""
        r = self.r
        for x, ahead in ((left + 1.1, False), (right - 1.1, True)) if right - left > 8 else ():
            for z in self._positions(5, 70, (5.6, 6.6), r.uniform(0.4, 0.95)):
                self._vehicle(r.choices((CAR, TRUCK), (30, 1))[0], x + r.uniform(-0.15, 0.15), z, ahead)
        tram = r.random() < 0.25
        for x, ahead in ((r.uniform(-0.5, 0.5), True), (-3.3 + r.uniform(-0.3, 0.3), False)):
            for z in self._positions(8, 70, (9, 32)) if x - 1.2 > left else ():
                cls = TRAIN if tram and z > 9 else r.choices((CAR, TRUCK, BUS), (7, 2, 2))[0]
                self._vehicle(cls, x + r.uniform(-0.3, 0.3), z, ahead)
                tram = tram and cls != TRAIN
        for z in self._positions(6, 40, (10, 50), 0.6):
            self._cycle(r.choice((right - 2.4, 1.2, -2.5)), z, ROAD)
        for z in self._positions(8, 40, (2, 9), 0.3):
            self._person(r.uniform(left, right), z, ROAD)

    def _vehicle(self, cls: int, x: float, z: float, ahead: bool) -> None:
        """Draw a vehicle that drives ahead of the camera or approaches it, with its nearest point at depth `z`.

        Its side profile is extruded: the edges from the far end to the near end, then the visible side and its details.
        """
        r, (profile, windows) = self.r, _profile(self.r, cls)
        length, low = profile[-1][0], profile[0][1]
        half, wheel = (0.88, 0.32) if cls == CAR else (1.22, 0.48)
        side = 0 if abs(x) < half else -1 if x > 0 else 1
        paint, light, glass = self._color(0.6), self.lights[-side], _tint(GRAY, r.uniform(0.15, 0.4))

        def panel(points: Sequence[World], color: Color) -> None:
            """Add a face with (along, across, up) corners in the vehicle's coordinates."""
            style = (color, GLASS, self.haze) if color is glass else (color,)
            self._face(
                [(x + v * half, y, z + (u if ahead else length - u)) for u, v, y in points], cls, *style
            )

        if cls == TRAIN:  # its rails
            for u in (-0.72, 0.72):
                self._rect((x + u, x + u + 0.08), (0, 0), (1, z), ROAD, GRAY, ASPHALT)
        self._shadow(x, z + length / 2, half * 1.2, length * 0.56, ROAD)
        edges = list(pairwise(profile))
        for (a, y, kind), (b, top, _) in reversed(edges) if ahead else edges:
            color = glass if kind == "g" else _tint(paint, {"p": 0.35, "t": 1.12}.get(kind, 0.85))
            panel([(a, -1, y), (a, 1, y), (b, 1, top), (b, -1, top)], color)
        if side:
            panel([(a, side, y) for a, y, _ in profile], _tint(paint, light))
            panel([(a, side, y) for a, y in windows], glass)
            for a in (length / 3, length / 2, length * 2 / 3):  # pillars and door gaps
                gap = ((a - 0.04, low), (a - 0.04, windows[1][1]), (a + 0.04, windows[1][1]), (a + 0.04, low))
                panel([(b, side, y) for b, y in gap], _tint(paint, light * 0.7))
            for a in (0.19 * length, 0.81 * length) if cls != TRAIN else ():
                for k, color in ((wheel, BLACK), (wheel * 0.6, GRAY)):
                    panel([(a + k * u, side, wheel + k * v) for u, v in CIRCLE], color)
        end, y = 0.0 if ahead else length, low + 0.35
        lamp = _tint(RED if ahead else WHITE, 1.5 if self.dusk else 0.9)
        details = [
            (-0.97, -0.67, y, 0.2, lamp),
            (0.67, 0.97, y, 0.2, lamp),
            (-0.26, 0.26, y - 0.25, 0.15, WHITE),
        ]
        if cls in (BUS, TRAIN):  # the destination
            details.append((-0.5, 0.5, 2.6, 0.2, YELLOW))
        if cls != TRAIN:
            details += [(-0.95, -0.68, 0.0, low + 0.02, BLACK), (0.68, 0.95, 0.0, low + 0.02, BLACK)]
        for u, v, y, height, color in details:
            panel([(end, u, y), (end, v, y), (end, v, y + height), (end, u, y + height)], color)


# Side profile of a vehicle from the rear to the front: (position, height, kind of the edge to the next corner), where
# p: plastic, b: body, t: top, g: glass. The second item is the outline of the side windows.
_Profile = tuple[list[tuple[float, float, str]], list[Span]]
_SEDAN: _Profile = (
    [(0, 0.3, "p"), (0, 0.58, "b"), (0.06, 0.95, "t"), (0.7, 1.0, "g"), (1.35, 1.42, "t"), (2.6, 1.44, "g"),
     (3.4, 0.98, "t"), (4.3, 0.8, "b"), (4.45, 0.28, "p")], [(0.95, 1.02), (1.4, 1.33), (2.55, 1.34), (3.15, 1.0)],
)  # fmt: skip
_WAGON: _Profile = (
    [(0, 0.3, "p"), (0, 0.6, "b"), (0.05, 0.95, "g"), (0.4, 1.46, "t"), (2.1, 1.5, "g"), (2.95, 1.02, "t"),
     (3.75, 0.84, "b"), (3.9, 0.28, "p")], [(0.3, 1.03), (0.5, 1.36), (2.05, 1.4), (2.7, 1.04)],
)  # fmt: skip
_VAN: _Profile = (
    [(0, 0.35, "p"), (0, 0.65, "b"), (0.0, 1.25, "g"), (0.12, 2.0, "t"), (3.6, 2.02, "g"), (4.3, 1.25, "t"),
     (4.85, 1.05, "b"), (4.95, 0.35, "p")], [(1.6, 1.3), (1.6, 1.85), (3.5, 1.87), (4.1, 1.3)],
)  # fmt: skip


def _profile(r: Random, cls: int) -> _Profile:
    if cls == CAR:
        return r.choice((_SEDAN, _WAGON, _VAN))
    high, n = r.uniform(2.9, 3.4), r.uniform(6, 10) if cls == TRUCK else r.uniform(9, 13)
    if cls == TRUCK:
        cab = [(n - 2, 2.4, "t"), (n - 0.4, 2.5, "g"), (n - 0.1, 1.45, "b"), (n, 0.5, "p")]
        box = [(0.0, 0.7, "b"), (0.0, high, "t"), (n - 2, high, "b")]
        return [*box, *cab], [(n - 1.5, 1.5), (n - 1.5, 2.2), (n - 0.7, 2.2), (n - 0.4, 1.5)]
    low = 0.4 if cls == BUS else 0.16
    rear = [(0.0, low, "b"), (0.0, 1.3, "g"), (0.02, 2.5, "b"), (0.05, high, "t")]
    front = [(n - 0.1, high, "b"), (n - 0.05, 2.5, "g"), (n, 1.3, "b"), (n, low, "p")]
    return rear + front, [(0.2, 1.35), (0.2, 2.45), (n - 0.2, 2.45), (n - 0.2, 1.35)]


def _tint(color: Color, factor: float) -> Color:
    return color[0] * factor, color[1] * factor, color[2] * factor
