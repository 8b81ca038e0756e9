"""Roadside objects: trees, hedges, lamp posts, traffic lights, signs, and unlabeled clutter."""

from __future__ import annotations

from random import Random

from slipstream.zoo.street_scenes.canvas import (
    FOLIAGE,
    GLASS,
    OBJECTS,
    Canvas,
    Color,
    Point,
    random_color,
    tint,
)

__all__ = [
    "crown",
    "draw_clutter",
    "draw_lamp",
    "draw_shrub",
    "draw_sign",
    "draw_traffic_light",
    "draw_tree",
    "leaf_colors",
]

POLE, TRAFFIC_LIGHT, TRAFFIC_SIGN, VEGETATION, VOID = 5, 6, 7, 8, 255

_METAL: tuple[Color, ...] = ((0.3, 0.31, 0.32), (0.5, 0.5, 0.5), (0.16, 0.2, 0.17), (0.12, 0.12, 0.13),
                              (0.62, 0.62, 0.6), (0.35, 0.26, 0.18))  # fmt: skip
_LOBES = ((1, 0), (0.92, 0.38), (0.71, 0.71), (0.38, 0.92), (0, 1), (-0.38, 0.92), (-0.71, 0.71),
          (-0.92, 0.38), (-1, 0), (-0.92, -0.38), (-0.71, -0.71), (-0.38, -0.92), (0, -1), (0.38, -0.92),
          (0.71, -0.71), (0.92, -0.38))  # fmt: skip


def leaf_colors(r: Random) -> tuple[Color, Color]:
    """Return the light and the dark color of a plant: usually green, sometimes autumnal or gray."""
    pick = r.random()
    if pick < 0.72:
        light = random_color(r, 0.0, 0.0, 1.0)
    elif pick < 0.93:
        light = tint(random_color(r, 0.0, 1.0, 0.0), 0.75)
    else:
        light = tint(random_color(r, 1.0, 0.0, 0.0), 0.6)
    return light, (light[0] * 0.22, light[1] * 0.26, light[2] * 0.3)


def crown(
    canvas: Canvas,
    r: Random,
    center: tuple[float, float, float],
    radius: Point,
    leaves: tuple[Color, Color],
    holes: float = 0.0,
) -> None:
    """Paint an irregular cluster of leaves around a world point. `holes` is the transparent fraction."""
    x, y, z = center
    point = canvas.point
    cx, cy = point(x, y, z)
    sx = canvas.camera.focal / z
    points = []
    for u, v in _LOBES:
        k = 0.72 + 0.42 * r.random()
        points.append((cx + sx * radius[0] * u * k, cy - 2 * sx * radius[1] * v * k))
    plane = (0.0, 0.0, 1.0 / z)
    canvas.add(
        points, VEGETATION, leaves[0], FOLIAGE, leaves[1], (holes, r.uniform(0, 50), y, radius[1]), plane
    )


def draw_tree(canvas: Canvas, r: Random, x: float, z: float, leaves: tuple[Color, Color]) -> None:
    """Draw a leafy, conical or sparse tree with its trunk and branches."""
    canvas.set_layer(OBJECTS, z)
    height, stem = r.uniform(4.0, 9.5), r.uniform(1.6, 3.0)
    bark = tint(random_color(r, 0.4, 0.6, 0.0), 0.42)
    width = r.uniform(0.18, 0.42)
    foot, fork = canvas.point(x, 0, z), canvas.point(x + r.uniform(-0.2, 0.2), stem + 0.5, z)
    canvas.limb(foot, fork, width * 1.3, width, VEGETATION, bark)
    if r.random() < 0.18:
        for i in range(6):
            y = stem * 0.6 + (height - stem) * i / 6
            size = (height - y) * 0.32
            crown(canvas, r, (x, y + size * 0.4, z), (size, size * 0.7), leaves)
        return
    spread = r.uniform(0.32, 0.5) * (height - stem * 0.5)
    for _ in range(3):
        tip = canvas.point(x + r.uniform(-1, 1) * spread, stem + r.uniform(0.4, 0.8) * (height - stem), z)
        canvas.limb(fork, tip, width * 0.7, width * 0.2, VEGETATION, bark)
    middle, holes = (stem + height) / 2 + 0.3, r.uniform(0.03, 0.25)
    for i in range(7):
        # Paint the lower and rear clusters first, and darker, because the upper clusters shade them.
        up = (i - 3) / 6 * (height - stem) * 0.7
        shade = 0.62 + 0.09 * i
        center = (x + r.uniform(-0.75, 0.75) * spread, middle + up, z + r.uniform(-0.5, 0.5))
        size = spread * r.uniform(0.42, 0.75)
        crown(
            canvas,
            r,
            center,
            (size, size * 0.85),
            (tint(leaves[0], shade), leaves[1]),
            holes if i > 4 else 0.0,
        )


def draw_shrub(
    canvas: Canvas, r: Random, x: float, z: float, leaves: tuple[Color, Color], height: float
) -> None:
    """Draw a shrub, which consists of a few leaf clusters on the ground."""
    canvas.set_layer(OBJECTS, z)
    for i in range(3):
        center = (x + r.uniform(-0.6, 0.6) * height, height * (0.35 + 0.1 * i), z)
        crown(canvas, r, center, (height * 0.75, height * 0.5), leaves)


def _post(canvas: Canvas, x: float, z: float, height: float, width: float, color: Color) -> None:
    foot, top = canvas.point(x, 0, z), canvas.point(x, height, z)
    canvas.limb(foot, top, width, width * 0.8, POLE, color)
    lit = canvas.light.sun_side * width * 0.25
    a, b = canvas.point(x + lit, 0, z), canvas.point(x + lit, height, z)
    canvas.limb(a, b, width * 0.3, width * 0.25, POLE, tint(color, 1.35))


def draw_lamp(canvas: Canvas, r: Random, x: float, z: float, inward: int) -> None:
    """Draw a lamp post with an arm over the street, a lantern post, or a plain mast or bollard."""
    canvas.set_layer(OBJECTS, z)
    metal = r.choice(_METAL)
    kind = r.random()
    if kind < 0.25:
        _post(canvas, x, z, r.uniform(0.8, 1.2), 0.16, metal)
        return
    height = r.uniform(5.0, 9.0) if kind < 0.75 else r.uniform(3.2, 4.5)
    _post(canvas, x, z, height, r.uniform(0.13, 0.24), metal)
    top = canvas.point(x, height, z)
    if kind < 0.75:
        tip = canvas.point(x + inward * r.uniform(1.2, 2.6), height + 0.5, z)
        canvas.limb(top, tip, 0.12, 0.09, POLE, metal)
        head = canvas.point(x + inward * 3.0, height + 0.5, z)
        canvas.limb(tip, head, 0.18, 0.22, POLE, tint(metal, 1.3))
    elif kind < 0.9:
        canvas.limb((top[0], top[1]), canvas.point(x, height - 0.6, z), 0.5, 0.25, POLE, (0.75, 0.74, 0.66))
        canvas.limb(canvas.point(x, height + 0.1, z), top, 0.15, 0.6, POLE, metal)


def draw_traffic_light(canvas: Canvas, r: Random, x: float, z: float, inward: int) -> None:
    """Draw a traffic light on a post, and often a second one on an arm above the road."""
    canvas.set_layer(OBJECTS, z)
    metal, lamp = r.choice(_METAL), r.randrange(3)
    arm = r.random() < 0.4
    height = 5.6 if arm else 3.2
    _post(canvas, x, z, height, 0.17, metal)
    if arm:
        reach = x + inward * r.uniform(2.2, 3.8)
        canvas.limb(canvas.point(x, height - 0.1, z), canvas.point(reach, height, z), 0.13, 0.1, POLE, metal)
        _lamps(canvas, reach, height - 0.6, z, lamp, r)
    _lamps(canvas, x + inward * 0.22, 2.75, z, lamp, r)


def _lamps(canvas: Canvas, x: float, y: float, z: float, lit: int, r: Random) -> None:
    case = r.choice(((0.05, 0.06, 0.06), (0.1, 0.13, 0.1), (0.3, 0.3, 0.3), (0.5, 0.45, 0.1)))
    faces_camera = r.random() < 0.75
    canvas.front((x - 0.19, x + 0.19), (y - 0.52, y + 0.52), z, TRAFFIC_LIGHT, case)
    if not faces_camera:
        return
    for i, color in enumerate(((1.3, 0.12, 0.08), (1.3, 0.8, 0.1), (0.1, 1.2, 0.55))):
        center = canvas.point(x, y + 0.32 - 0.32 * i, z)
        canvas.disc(center, 0.13, TRAFFIC_LIGHT, color if i == lit else tint(color, 0.16))


_DIAMOND = ((0, -1.2), (1.2, 0), (0, 1.2), (-1.2, 0))
_TRIANGLE = ((0, -1.15), (1.1, 0.75), (-1.1, 0.75))
_YIELD = ((-1.1, -0.75), (1.1, -0.75), (0, 1.15))
_SQUARE = ((-0.95, -0.95), (0.95, -0.95), (0.95, 0.95), (-0.95, 0.95))
_RED, _WHITE, _BLUE, _YELLOW = (0.78, 0.07, 0.08), (0.9, 0.9, 0.88), (0.06, 0.2, 0.62), (0.93, 0.72, 0.08)
_SIGNS: tuple[tuple[tuple[Point, ...] | None, Color, Color], ...] = (
    (None, _RED, _WHITE), (None, _RED, _RED), (None, _BLUE, _WHITE), (None, _RED, _BLUE),
    (_DIAMOND, _WHITE, _YELLOW), (_TRIANGLE, _RED, _WHITE), (_YIELD, _RED, _WHITE), (_SQUARE, _BLUE, _WHITE),
)  # fmt: skip


def draw_sign(canvas: Canvas, r: Random, x: float, z: float) -> None:
    """Draw one or two round, triangular or square signs on a post, or a large direction board."""
    canvas.set_layer(OBJECTS, z)
    if r.random() < 0.2:
        _board(canvas, r, x, z)
        return
    height = r.uniform(2.1, 3.1)
    _post(canvas, x, z, height + 0.3, 0.09, r.choice(_METAL))
    for i in range(r.choice((1, 1, 2))):
        center = canvas.point(x, height - 0.75 * i, z)
        outline, rim, field = r.choice(_SIGNS)
        if r.random() < 0.2:
            rim = field = (0.5, 0.5, 0.5)
        radius = r.uniform(0.32, 0.45)
        canvas.disc(center, radius, TRAFFIC_SIGN, rim, outline)
        canvas.disc(center, radius * 0.68, TRAFFIC_SIGN, field, outline)
        a, b = canvas.point(x - 0.1, height - 0.75 * i, z), canvas.point(x + 0.1, height - 0.75 * i, z)
        if r.random() < 0.6:
            canvas.limb(a, b, 0.12, 0.12, TRAFFIC_SIGN, r.choice((_WHITE, (0.05, 0.05, 0.05))))


def _board(canvas: Canvas, r: Random, x: float, z: float) -> None:
    width, height, low = r.uniform(0.8, 1.6), r.uniform(0.5, 1.3), r.uniform(1.2, 2.6)
    for u in (-0.6, 0.6):
        _post(canvas, x + u * width, z, low + height, 0.1, r.choice(_METAL))
    field = r.choice((_BLUE, _YELLOW, _WHITE, (0.05, 0.35, 0.18)))
    ink = (0.05, 0.05, 0.05) if field in (_YELLOW, _WHITE) else _WHITE
    canvas.front((x - width, x + width), (low, low + height), z, TRAFFIC_SIGN, ink)
    canvas.front(
        (x - width + 0.05, x + width - 0.05), (low + 0.05, low + height - 0.05), z, TRAFFIC_SIGN, field
    )
    for i in range(2):
        y = low + height * (0.25 + 0.35 * i)
        canvas.front(
            (x - width * 0.7, x + width * r.uniform(0, 0.7)), (y, y + height * 0.16), z, TRAFFIC_SIGN, ink
        )


def draw_clutter(canvas: Canvas, r: Random, x: float, z: float) -> None:
    """Draw an object that Cityscapes does not evaluate: a bin, a junction box or a bus shelter."""
    canvas.set_layer(OBJECTS, z)
    paint = random_color(r, 0.5, 0.15, 0.2)
    if r.random() < 0.15:
        canvas.front((x - 1.6, x + 1.6), (0.3, 2.2), z, VOID, (0.3, 0.34, 0.36), GLASS, canvas.light.haze)
        canvas.front((x - 1.8, x + 1.8), (2.2, 2.45), z, VOID, tint(paint, 0.6))
        for u in (-1.6, 1.5):
            canvas.front((x + u, x + u + 0.1), (0, 2.2), z, VOID, tint(paint, 0.5))
        return
    half, height = r.uniform(0.25, 0.45), r.uniform(0.8, 1.4)
    canvas.front((x - half, x + half), (0, height), z, VOID, paint)
    canvas.front((x - half - 0.04, x + half + 0.04), (height, height + 0.12), z, VOID, tint(paint, 0.55))
    canvas.front((x - half * 0.8, x + half * 0.8), (height * 0.55, height * 0.62), z, VOID, tint(paint, 0.4))
