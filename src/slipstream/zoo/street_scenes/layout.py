"""Layout of a street scene: light, ground, rows of houses, traffic and people."""

from __future__ import annotations

import math
from random import Random
from typing import NamedTuple

from slipstream.zoo.street_scenes.canvas import (
    ASPHALT,
    BACKDROP,
    EGO,
    GRASS,
    GROUND,
    OBJECTS,
    PAVING,
    SKY,
    Camera,
    Canvas,
    Color,
    Light,
    tint,
)
from slipstream.zoo.street_scenes.furniture import (
    draw_clutter,
    draw_lamp,
    draw_shrub,
    draw_sign,
    draw_traffic_light,
    draw_tree,
    leaf_colors,
)
from slipstream.zoo.street_scenes.people import draw_cycle, draw_person
from slipstream.zoo.street_scenes.sides import Side, draw_backdrop, draw_side
from slipstream.zoo.street_scenes.vehicles import Pose, draw_bus, draw_car, draw_train, draw_truck

__all__ = ["lay_out"]

ROAD, SIDEWALK, TERRAIN, SKY_CLASS, VOID = 0, 1, 9, 10, 255


class Street(NamedTuple):
    """The ground plan: curbs, the strips between curbs and houses, and the junction (0 if there is none)."""

    left: float
    right: float
    edge_left: float
    edge_right: float
    junction: float
    width: float
    parking: tuple[bool, bool]
    verge: tuple[float, float]


def lay_out(r: Random) -> Canvas:
    """Return a canvas with the shapes of a random scene. The first shape is the sky, which covers the whole image."""
    canvas = Canvas(_camera(r), _light(r))
    street = _street(r)
    _sky(canvas, r)
    draw_backdrop(canvas, r)
    _ground(canvas, r, street)
    for sign, edge in ((-1, street.edge_left), (1, street.edge_right)):
        draw_side(canvas, r, Side(sign, edge, street.junction, street.width))
    _roadside(canvas, r, street)
    _parked_vehicles(canvas, r, street)
    _traffic(canvas, r, street)
    _walkers(canvas, r, street)
    _hood(canvas, r)
    return canvas


def _camera(r: Random) -> Camera:
    return Camera(r.uniform(0.7, 1.0), r.gauss(0.5, 0.07), r.uniform(0.36, 0.47), r.uniform(1.2, 1.75))


def _light(r: Random) -> Light:
    sun, dusk = r.choice((-1, -1, 0, 0, 1, 1)), r.random() < 0.1
    bright, dark = (r.uniform(1.1, 1.35), r.uniform(0.5, 0.75)) if sun else (0.95, 0.95)
    gain = r.uniform(0.35, 0.5) if dusk else r.uniform(0.7, 1.25)
    warm = r.uniform(-0.1, 0.1) - (0.08 if dusk else 0.0)
    haze = tint(r.choice(((0.8, 0.84, 0.9), (0.86, 0.86, 0.86), (0.92, 0.86, 0.76))), 0.55 if dusk else 1.0)
    return Light(
        sun_side=sun,
        left=bright if sun < 0 else dark,
        right=bright if sun > 0 else dark,
        facing=r.uniform(0.65, 1.05),
        top=1.12,
        tint=(gain * (1 + warm), gain, gain * (1 - warm)),
        haze=haze,
        reach=r.choice((110.0, 250.0, 500.0, 900.0)),
        dusk=dusk,
    )


def _street(r: Random) -> Street:
    parking = (r.random() < 0.6, r.random() < 0.65)
    left = -r.choice((2.0, 4.8, 5.2, 8.2)) - (2.3 if parking[0] else 0.3)
    right = r.uniform(1.7, 2.3) + (2.3 if parking[1] else 0.2) + r.choice((0, 0, 0, 3.2))
    verge = (r.choice((0.0, 0.0, 1.4, 2.5)), r.choice((0.0, 0.0, 1.4, 2.5)))
    edge_left = left - verge[0] - r.uniform(1.8, 4.5)
    edge_right = right + verge[1] + r.uniform(1.8, 4.5)
    junction = r.uniform(14, 50) if r.random() < 0.45 else 0.0
    return Street(left, right, edge_left, edge_right, junction, r.uniform(7, 12), parking, verge)


def _sky(canvas: Canvas, r: Random) -> None:
    canvas.set_layer(BACKDROP, 900)
    zenith = r.choice(((0.25, 0.48, 0.85), (0.42, 0.6, 0.85), (0.62, 0.66, 0.72), (0.8, 0.82, 0.85)))
    if canvas.light.dusk:
        zenith = tint(zenith, 0.5)
    corners = [(-0.1, -0.1), (1.1, -0.1), (1.1, 1.1), (-0.1, 1.1)]
    canvas.add(corners, SKY_CLASS, zenith, SKY, canvas.light.haze, (r.uniform(-0.4, 0.6), 0, 0, 0), (0, 0, 1))


def _ground(canvas: Canvas, r: Random, s: Street) -> None:
    canvas.set_layer(GROUND, 900)
    grass = r.choice(((0.24, 0.36, 0.12), (0.36, 0.38, 0.18), (0.16, 0.27, 0.1)))
    soil = r.choice(((0.4, 0.33, 0.22), (0.5, 0.47, 0.36), (0.22, 0.24, 0.12)))
    base, slab = r.uniform(0.18, 0.46), r.uniform(0.24, 0.62)
    asphalt = (base, base * r.uniform(0.97, 1.03), base * r.uniform(0.94, 1.06))
    paving = (slab, slab * r.uniform(0.9, 1.0), slab * r.uniform(0.8, 1.02))
    stones = (r.choice((0.3, 0.5, 1.0)), 0.0, 0.0, 0.0)
    for x_range in ((-400.0, s.edge_left), (s.edge_right, 400.0)):
        is_grass = r.random() < 0.75
        canvas.ground(x_range, (1.0, 900.0), TERRAIN if is_grass else SIDEWALK, grass if is_grass else paving,
                      GRASS if is_grass else PAVING, soil if is_grass else None, stones)  # fmt: skip
    canvas.ground((s.edge_left, s.edge_right), (1.0, 900.0), SIDEWALK, paving, PAVING, None, stones)
    for x0, width in ((s.left - s.verge[0], s.verge[0]), (s.right, s.verge[1])):
        if width:
            canvas.ground((x0, x0 + width), (1.0, 900.0), TERRAIN, grass, GRASS, soil)
    paint = (0.85, 0.85, 0.82)
    lanes = (r.uniform(1.55, 1.85), r.uniform(3.1, 3.5), r.choice((0.0, 0.0, 1.0)), r.uniform(0.3, 1.0))
    canvas.ground((s.left, s.right), (1.0, 900.0), ROAD, asphalt, ASPHALT, paint, lanes)
    for x in (s.left - 0.16, s.right):
        canvas.ground((x, x + 0.16), (1.0, 300.0), SIDEWALK, tint(paving, 1.25), PAVING, None, (1.0, 0, 0, 0))
    _road_details(canvas, r, s, asphalt, paint)


def _road_details(canvas: Canvas, r: Random, s: Street, asphalt: Color, paint: Color) -> None:
    """Paint patches and manhole covers and, in some scenes, a grass median and a cross street with a zebra crossing."""
    for _ in range(r.randint(1, 6)):
        x, z = r.uniform(s.left + 1, s.right - 1), r.uniform(4, 30)
        size = r.choice((0.35, 0.35, 0.9))
        canvas.ground_octagon(
            x, z, size, size * r.uniform(1, 3), ROAD, tint(asphalt, r.uniform(0.6, 1.2)), ASPHALT
        )
    if s.left < -8 and r.random() < 0.4:
        x = s.left / 2 - 0.2
        canvas.ground((x - 0.9, x + 0.9), (1.0, s.junction or 300.0), TERRAIN, (0.22, 0.32, 0.12), GRASS,
                      (0.4, 0.36, 0.25))  # fmt: skip
    if s.junction:
        z0, z1 = s.junction, s.junction + s.width
        canvas.ground((-90, 90), (z0, z1), ROAD, asphalt, ASPHALT, paint, (0, 0, 0, 1))
        x = s.left + 0.4
        while x < s.right - 0.5 and r.random() < 0.97:
            canvas.ground((x, x + 0.5), (z0 - 4.5, z0 - 1.5), ROAD, tint(paint, 0.85), ASPHALT)
            x += 1.0


def _positions_along(r: Random, start: float, stop: float, step: tuple[float, float]) -> list[float]:
    """Return random positions from `start` to `stop`. The spacing, drawn from the `step` range, grows with distance."""
    positions, z = [], start + r.uniform(0, step[1] / 2)
    while z < stop:
        positions.append(z)
        z += r.uniform(*step) * (1 + z / 60)
    return positions


def _is_in_junction(s: Street, z: float, margin: float = 0.0) -> bool:
    return s.junction > 0 and s.junction - margin < z < s.junction + s.width + margin


def _roadside(canvas: Canvas, r: Random, s: Street) -> None:
    """Place trees, lamp posts, signs, shrubs, clutter and traffic lights between each curb and the houses."""
    for sign, curb, edge in ((-1, s.left, s.edge_left), (1, s.right, s.edge_right)):
        leaves = leaf_colors(r)
        strip = curb + sign * 0.7
        if r.random() < 0.6:
            for z in _positions_along(r, 7, 75, (6.0, 12.0)):
                if not _is_in_junction(s, z, 2):
                    draw_tree(canvas, r, strip + sign * r.uniform(0, 0.6), z, leaves)
        for z in _positions_along(r, 7, 80, (8.0, 22.0)):
            draw_lamp(canvas, r, strip - sign * 0.2, z, -sign)
        for z in _positions_along(r, 7, 45, (10.0, 35.0)):
            draw_sign(canvas, r, strip + r.uniform(-0.2, 0.4) * sign, z)
        for z in _positions_along(r, 8, 40, (8.0, 50.0)):
            pick = r.random()
            outer_x = edge - sign * r.uniform(0.4, 0.9)
            if pick < 0.35:
                draw_shrub(canvas, r, outer_x, z, leaf_colors(r), r.uniform(0.5, 1.3))
            elif pick < 0.7:
                draw_clutter(canvas, r, outer_x, z)
        if s.junction and r.random() < 0.85:
            draw_traffic_light(canvas, r, strip - sign * 0.3, s.junction - 1.2, -sign)
            draw_traffic_light(canvas, r, strip - sign * 0.3, s.junction + s.width + 1, -sign)
        elif r.random() < 0.35:
            draw_traffic_light(canvas, r, strip - sign * 0.3, r.uniform(9, 40), -sign)


def _parked_vehicles(canvas: Canvas, r: Random, s: Street) -> None:
    """Place parked cars and trucks along the curbs, and parked two-wheelers on the sidewalks."""
    for sign, x, has_parking in ((-1, s.left + 1.15, s.parking[0]), (1, s.right - 1.15, s.parking[1])):
        occupancy = r.uniform(0.45, 0.95)
        for z in _positions_along(r, 5, 70, (5.6, 6.6)) if has_parking else ():
            if r.random() < occupancy and not _is_in_junction(s, z, 5):
                heading = math.pi if r.random() < (0.75 if sign < 0 else 0.05) else 0.0
                pose = Pose(x + r.uniform(-0.15, 0.15), z, heading + r.gauss(0, 0.03))
                (draw_truck if r.random() < 0.03 else draw_car)(canvas, r, pose)
        for z in _positions_along(r, 6, 30, (4.0, 30.0)):
            if r.random() < 0.55:
                edge = s.edge_left if sign < 0 else s.edge_right
                draw_cycle(
                    canvas, r, edge - sign * r.uniform(0.6, 1.6), z, SIDEWALK, r.random() < 0.28, False
                )


def _traffic(canvas: Canvas, r: Random, s: Street) -> None:
    """Place cyclists, and vehicles that drive ahead of the camera, approach it, or cross the junction."""
    ahead, oncoming = r.uniform(-0.5, 0.5), -3.3 + r.uniform(-0.3, 0.3)
    tram = r.random() < 0.17
    for lane, heading in ((ahead, 0.0), (oncoming, math.pi)):
        if lane - 1.2 < s.left:
            continue
        for z in _positions_along(r, 8, 70, (9.0, 32.0)):
            if _is_in_junction(s, z, 3):
                continue
            if tram and z > 9:
                tram = False
                _rails(canvas, lane)
                draw_train(canvas, r, Pose(lane, z, heading))
                break
            pick = r.random()
            draw = draw_truck if pick < 0.12 else draw_bus if pick < 0.23 else draw_car
            draw(canvas, r, Pose(lane + r.uniform(-0.3, 0.3), z, heading + r.gauss(0, 0.03)))
    if s.junction and r.random() < 0.55:
        turn = r.choice((-1, 1))
        x = r.uniform(s.left + 2, s.right - 2) - turn * 2.2
        draw = r.choice((draw_car, draw_car, draw_car, draw_bus, draw_truck))
        draw(canvas, r, Pose(x, s.junction + r.uniform(1.5, 4), turn * math.pi / 2 + r.gauss(0, 0.15)))
    for z in _positions_along(r, 6, 40, (10.0, 60.0)):
        if r.random() < 0.6:
            lane = r.choice((s.right - (2.6 if s.parking[1] else 0.6), ahead + 1.2, oncoming - 0.8))
            draw_cycle(canvas, r, lane, z, ROAD, r.random() < 0.35, True)


def _rails(canvas: Canvas, x: float) -> None:
    for u in (-0.72, 0.72):
        canvas.set_layer(GROUND, 1)
        canvas.ground((x + u - 0.04, x + u + 0.04), (1.0, 300.0), ROAD, (0.5, 0.5, 0.52), ASPHALT)


def _walkers(canvas: Canvas, r: Random, s: Street) -> None:
    """Place pedestrians on the sidewalks, alone or in pairs, and in some scenes also on the road."""
    for sign, curb, edge in ((-1, s.left, s.edge_left), (1, s.right, s.edge_right)):
        density = r.choice((0.15, 0.5, 0.9))
        for z in _positions_along(r, 6, 55, (3.0, 9.0)):
            for _ in range(r.choice((1, 1, 2)) if r.random() < density else 0):
                x = r.uniform(curb + sign * 0.5, edge - sign * 0.4)
                draw_person(canvas, r, x, z + r.uniform(-0.6, 0.6), SIDEWALK)
    if r.random() < 0.4:
        z = s.junction - 3 if s.junction else r.uniform(8, 35)
        for _ in range(r.randint(1, 4)):
            draw_person(canvas, r, r.uniform(s.left, s.right), z + r.uniform(-1, 1), ROAD)


def _hood(canvas: Canvas, r: Random) -> None:
    """In most scenes, paint the hood of the car that carries the camera. Metrics ignore the pixels of the hood."""
    if r.random() < 0.25:
        return
    canvas.set_layer(EGO, 1)
    top, sag, paint = r.uniform(0.9, 0.97), r.uniform(0.01, 0.05), r.uniform(0.04, 0.4)
    arc = [(x / 10, top + sag * (x / 5 - 1) ** 2) for x in range(-1, 12)]
    color = (paint, paint, paint * 1.04)
    canvas.add([*arc, (1.2, 1.2), (-0.2, 1.2)], VOID, color, 0, tint(color, 1.8))
    canvas.add([*arc, *((x, y + 0.012) for x, y in reversed(arc))], VOID, tint(color, 1.7))
    canvas.set_layer(OBJECTS, 1)
