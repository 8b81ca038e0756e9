"""Both sides of a street (houses, walls, fences, hedges and gaps), and the skyline behind them."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from slipstream.zoo.street_scenes.canvas import (
    BACKDROP,
    BARS,
    BRICK,
    FACADE,
    FOLIAGE,
    SIDES,
    Canvas,
    Color,
    random_color,
    tint,
)
from slipstream.zoo.street_scenes.furniture import crown, leaf_colors

__all__ = ["Side", "draw_backdrop", "draw_side"]

BUILDING, WALL, FENCE, VEGETATION = 2, 3, 4, 8


class Side(NamedTuple):
    """One side of the street: its sign (-1 or 1), its X coordinate, and the start and width of the gap at the cross
    street."""

    sign: int
    x: float
    junction: float
    width: float


def draw_backdrop(canvas: Canvas, r: Random) -> None:
    """Draw the skyline: distant houses and trees, and sometimes a house at the end of the street."""
    canvas.set_layer(BACKDROP, 300)
    for _ in range(r.randint(2, 7)):
        x, width, height = r.uniform(-120, 120), r.uniform(8, 30), r.uniform(8, 40)
        _flat_house(canvas, r, (x, x + width), height, 260.0)
    canvas.set_layer(BACKDROP, 200)
    leaves = leaf_colors(r)
    _treeline(canvas, r, leaves, r.uniform(3, 12))
    if r.random() < 0.45:
        x = r.uniform(-25, 5)
        _flat_house(canvas, r, (x, x + r.uniform(15, 40)), r.uniform(8, 18), 140.0)


def _flat_house(canvas: Canvas, r: Random, x: tuple[float, float], height: float, z: float) -> None:
    wall = random_color(r, 0.4, 0.5, 0.03)
    canvas.front(x, (0, height), z, BUILDING, wall, FACADE, tint(wall, 0.4), (3.0, 3.2, 0.5, r.random()))


def _treeline(canvas: Canvas, r: Random, leaves: tuple[Color, Color], height: float) -> None:
    z, points = 200.0, [canvas.point(-200, -1, 200.0)]
    for i in range(81):
        points.append(canvas.point(-200 + i * 5 + r.uniform(-1, 1), height * r.uniform(0.55, 1.2), z))
    points.append(canvas.point(200, -1, z))
    canvas.add(
        points, VEGETATION, leaves[0], FOLIAGE, leaves[1], (0, r.uniform(0, 50), height / 2, height / 2)
    )


def draw_side(canvas: Canvas, r: Random, side: Side) -> None:
    """Draw one side of the street, starting at the camera, with a gap at the junction."""
    weights = r.choice(((8, 1, 1, 1, 0.4), (4, 2, 2, 2, 1), (1.5, 2, 2.5, 4, 1), (10, 0.4, 0.4, 0.3, 0.2)))
    z, segments = 2.0, []
    while z < 150:
        length = r.uniform(7, 18) * (1 + z / 90)
        end = z + length
        if side.junction and z < side.junction + side.width and end > side.junction:
            segments.append((z, side.junction - 1.5))
            z = side.junction + side.width + 1.5
            continue
        segments.append((z, end))
        z = end
    draws = (_house, _wall, _fence, _hedge, _gap)
    for z0, z1 in segments:
        draw = r.choices(draws, weights)[0]
        if z1 - z0 > 1:
            canvas.set_layer(SIDES, z0)
            draw(canvas, r, side, z0, z1)


def _face_light(canvas: Canvas, side: Side) -> float:
    return canvas.light.right if side.sign < 0 else canvas.light.left


def _house(canvas: Canvas, r: Random, side: Side, z0: float, z1: float) -> None:
    back = r.choice((0.0, 0.0, 0.0, 2.0, 5.0))
    x = side.x + side.sign * back
    height = r.uniform(6, 20)
    paint = random_color(r, 0.36, 0.5, 0.03)
    shop = -1.0 if r.random() < 0.45 and not back else 1.0
    floor = r.uniform(2.9, 3.9)
    params = (r.uniform(1.6, 3.4), floor, shop * r.uniform(0.35, 0.68), r.random())
    glass = (0.95, 0.75, 0.4) if canvas.light.dusk else r.choice(((0.08, 0.1, 0.13), (0.2, 0.25, 0.32)))
    lit = _face_light(canvas, side)
    if r.random() < 0.6:
        _roof(canvas, r, side, x, (z0, z1), height)
    outer = x + side.sign * r.uniform(7, 14)
    wall = tint(paint, canvas.light.facing * 0.9)
    blind = params if r.random() < 0.5 else (99.0, 99.0, 0.0, 0.0)
    canvas.front((min(x, outer), max(x, outer)), (0, height), z0, BUILDING, wall, FACADE, glass, blind)
    canvas.side(x, (z0, z1), (0, height), BUILDING, tint(paint, lit), FACADE, glass, params)
    canvas.side(
        x, (z0, z1), (height - 0.35, height), BUILDING, tint(paint, lit * 0.72), BRICK, None, (9, 0, 0, 0)
    )
    canvas.side(x, (z0, z1), (0, 0.7), BUILDING, tint(paint, lit * 0.6), BRICK, None, (0.3, 0, 0, 0))
    if shop < 0:
        _shop_front(canvas, r, side, (z0, z1), floor, lit)
    elif r.random() < 0.4:
        _balconies(canvas, r, side, x, (z0, z1), floor, height)
    if back:
        (_fence if r.random() < 0.5 else _low_hedge)(canvas, r, side, z0, z1)


def _roof(canvas: Canvas, r: Random, side: Side, x: float, z: tuple[float, float], height: float) -> None:
    tiles = random_color(r, 0.45, 0.5, 0.02)
    point, ridge, rise = canvas.point, x + side.sign * 4.0, height + r.uniform(2.5, 4.5)
    gable = [point(x, height, z[0]), point(ridge, rise, z[0]), point(ridge + side.sign * 4, height, z[0])]
    slope = [
        point(x, height, z[0]),
        point(x, height, z[1]),
        point(ridge, rise, z[1]),
        point(ridge, rise, z[0]),
    ]
    for _ in range(r.randint(0, 2)):
        zc = r.uniform(*z)
        chimney, shaft = (ridge - 0.4, ridge + 0.4), (rise - 1, rise + 1.2)
        canvas.front(chimney, shaft, zc, BUILDING, tint(tiles, 0.8), BRICK, None, (0.25, 0, 0, 0))
    canvas.add(gable, BUILDING, tint(tiles, 0.75), BRICK, None, (0.4, 0, 0, 0))
    canvas.add(slope, BUILDING, tiles, BRICK, None, (0.45, 0, 0, 0), (1 / x, 0.0, 0.0))


def _shop_front(
    canvas: Canvas, r: Random, side: Side, z: tuple[float, float], floor: float, lit: float
) -> None:
    """Paint a signboard for each shop on the ground floor, and awnings for some of them."""
    point, z0 = canvas.point, z[0]
    while z0 < z[1] - 3:
        z1 = min(z0 + r.uniform(4, 8), z[1])
        sign = tint(random_color(r, 0.3, 0.2, 0.12), lit)
        canvas.side(side.x, (z0 + 0.3, z1 - 0.2), (floor - 0.75, floor - 0.15), BUILDING, sign, BRICK,
                    tint(sign, 0.3), (9, 0, 0, 0))  # fmt: skip
        if r.random() < 0.45:
            out = side.x - side.sign * 1.3
            points = [point(side.x, 3.0, z0 + 0.4), point(side.x, 3.0, z1 - 0.4), point(out, 2.45, z1 - 0.4),
                      point(out, 2.45, z0 + 0.4)]  # fmt: skip
            canvas.add(points, BUILDING, tint(random_color(r, 0.25, 0.2, 0.15), 1.1))
        z0 = z1


def _balconies(
    canvas: Canvas, r: Random, side: Side, x: float, z: tuple[float, float], floor: float, height: float
) -> None:
    rail, out = random_color(r, 0.6, 0.2, 0.05), x - side.sign * 0.9
    middle = (z[0] + z[1]) / 2
    level = floor
    while level + 1.2 < height:
        box = (min(x, out), max(x, out))
        canvas.side(out, (middle - 1.5, middle + 1.5), (level, level + 1), BUILDING, tint(rail, 0.9), BRICK,
                    None, (0.12, 0, 0, 0))  # fmt: skip
        canvas.front(
            box, (level, level + 1), middle - 1.5, BUILDING, tint(rail, 0.7), BRICK, None, (0.12, 0, 0, 0)
        )
        level += floor


def _background(canvas: Canvas, r: Random, side: Side, z0: float, z1: float) -> None:
    """Draw trees or a house behind a wall, a fence or a hedge, or in a gap."""
    if r.random() < 0.35:
        x = side.x + side.sign * r.uniform(4, 10)
        paint = tint(random_color(r, 0.4, 0.45, 0.05), _face_light(canvas, side))
        height = r.uniform(4, 11)
        params = (r.uniform(2, 4), 3.0, 0.45, 0.2)
        if r.random() < 0.7:
            _roof(canvas, r, side, x, (z0, z1), height)
        canvas.front((min(x, x + 9 * side.sign), max(x, x + 9 * side.sign)), (0, height), z0, BUILDING,
                     tint(paint, 0.8), FACADE, (0.1, 0.12, 0.15), params)  # fmt: skip
        canvas.side(x, (z0, z1), (0, height), BUILDING, paint, FACADE, (0.1, 0.12, 0.15), params)
        return
    leaves = leaf_colors(r)
    for i in range(r.randint(2, 6)):
        z = z1 - (z1 - z0) * (i + r.random()) / 6
        size = r.uniform(1.4, 3.2)
        center = (side.x + side.sign * r.uniform(2, 4), r.uniform(1.5, 4.5), max(z, 4.0))
        crown(canvas, r, center, (size, size * 0.9), leaves)


def _wall(canvas: Canvas, r: Random, side: Side, z0: float, z1: float) -> None:
    _background(canvas, r, side, z0, z1)
    height = r.uniform(1.0, 3.2)
    paint = random_color(r, 0.5, 0.38, 0.06)
    course = r.choice((0.12, 0.25, 0.5, 1.2))
    lit = _face_light(canvas, side)
    outer = side.x + side.sign * 0.5
    canvas.front((min(side.x, outer), max(side.x, outer)), (0, height), z0, WALL,
                 tint(paint, canvas.light.facing * 0.8), BRICK, None, (course, 0, 0, 0))  # fmt: skip
    canvas.side(side.x, (z0, z1), (0, height), WALL, tint(paint, lit), BRICK, None, (course, 0, 0, 0))
    if r.random() < 0.6:
        canvas.side(
            side.x, (z0, z1), (height - 0.15, height), WALL, tint(paint, lit * 1.2), BRICK, None, (9, 0, 0, 0)
        )
    if r.random() < 0.3:
        tag = tint(random_color(r, 0.1, 0.1, 0.1), lit)
        z = r.uniform(z0, z1)
        canvas.side(
            side.x, (z, z + 3), (0.4, height * 0.7), WALL, tag, FOLIAGE, tint(paint, lit), (0, 3, 1, 9)
        )


def _fence(canvas: Canvas, r: Random, side: Side, z0: float, z1: float) -> None:
    _background(canvas, r, side, z0, z1)
    height, kind = r.uniform(0.9, 2.1), r.randrange(3)
    paint = tint(random_color(r, 0.45, 0.25, 0.18), _face_light(canvas, side))
    # kind 0: pickets, 1: mesh between posts, 2: horizontal planks
    gap = (r.uniform(0.12, 0.22), 0.1, 0.22)[kind]
    params = (gap, float(kind), height, r.uniform(0.3, 0.6) if kind != 1 else 0.25)
    canvas.side(side.x, (z0, z1), (0, height), FENCE, paint, BARS, None, params)


def _low_hedge(canvas: Canvas, r: Random, side: Side, z0: float, z1: float) -> None:
    height = r.uniform(0.7, 2.4)
    leaves = leaf_colors(r)
    point, x = canvas.point, side.x
    ragged = [point(x, height * r.uniform(0.85, 1.1), z0 + (z1 - z0) * i / 10) for i in range(11)]
    points = [point(x, 0, z0), *ragged, point(x, 0, z1)]
    leaves = (tint(leaves[0], _face_light(canvas, side)), leaves[1])
    params = (0.0, r.uniform(0, 50), height * 0.6, height * 0.7)
    canvas.add(points, VEGETATION, leaves[0], FOLIAGE, leaves[1], params, (1 / x, 0.0, 0.0))


def _hedge(canvas: Canvas, r: Random, side: Side, z0: float, z1: float) -> None:
    _background(canvas, r, side, z0, z1)
    _low_hedge(canvas, r, side, z0, z1)
    leaves = leaf_colors(r)
    for i in range(r.randint(0, 4)):
        z = max(z1 - (z1 - z0) * (i + r.random()) / 4, 4.0)
        size = r.uniform(1.2, 3.0)
        crown(canvas, r, (side.x + side.sign * 0.8, r.uniform(1.5, 5), z), (size, size), leaves)


def _gap(canvas: Canvas, r: Random, side: Side, z0: float, z1: float) -> None:
    if r.random() < 0.5:
        _background(canvas, r, side, z0, z1)
