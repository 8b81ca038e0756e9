"""Cars, vans, trucks, buses and trams: extruded side profiles with windows, wheels and lights."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random
from typing import NamedTuple

from slipstream.zoo.street_scenes.canvas import (
    ASPHALT,
    GLASS,
    OBJECTS,
    Canvas,
    Color,
    Point,
    random_color,
    tint,
)

__all__ = ["Pose", "draw_bus", "draw_car", "draw_train", "draw_truck"]

ROAD, CAR, TRUCK, BUS, TRAIN = 0, 13, 14, 15, 16

# Corners as (position along the vehicle, height, type of the edge to the next corner), starting at the rear bumper.
_Profile = tuple[tuple[float, float, str], ...]
_SEDAN: _Profile = (
    (0, 0.3, "p"), (0, 0.58, "b"), (0.06, 0.95, "t"), (0.7, 1.0, "g"), (1.35, 1.42, "t"), (2.6, 1.44, "g"),
    (3.4, 0.98, "t"), (4.3, 0.8, "b"), (4.45, 0.5, "p"), (4.45, 0.28, "p"),
)  # fmt: skip
_HATCH: _Profile = (
    (0, 0.3, "p"), (0, 0.6, "b"), (0.05, 0.95, "g"), (0.4, 1.46, "t"), (2.1, 1.5, "g"),
    (2.95, 1.02, "t"), (3.75, 0.84, "b"), (3.9, 0.5, "p"), (3.9, 0.28, "p"),
)  # fmt: skip
_WAGON: _Profile = (
    (0, 0.32, "p"), (0, 0.65, "b"), (0.04, 1.08, "g"), (0.3, 1.66, "t"), (2.7, 1.7, "g"),
    (3.5, 1.15, "t"), (4.5, 0.98, "b"), (4.6, 0.55, "p"), (4.6, 0.32, "p"),
)  # fmt: skip
_VAN: _Profile = (
    (0, 0.35, "p"), (0, 0.65, "b"), (0.0, 1.25, "g"), (0.12, 2.0, "t"), (3.6, 2.02, "g"),
    (4.3, 1.25, "t"), (4.85, 1.05, "b"), (4.95, 0.55, "p"), (4.95, 0.35, "p"),
)  # fmt: skip
_CAB: _Profile = (
    (0, 0.5, "b"), (0, 2.5, "t"), (1.4, 2.55, "g"), (1.75, 1.45, "b"), (1.85, 0.7, "p"), (1.85, 0.4, "p"),
)  # fmt: skip


def _box(length: float, low: float, high: float) -> _Profile:
    return (0, low, "b"), (0.05, high, "t"), (length - 0.1, high, "b"), (length, low, "b")


class Pose(NamedTuple):
    """The X coordinate of a vehicle's rear, its nearest Z, and its heading in radians (0: away from the camera)."""

    x: float
    z: float
    heading: float


class _Body:
    """One extruded profile, with helpers to draw on its visible end and its visible side."""

    def __init__(
        self, canvas: Canvas, pose: Pose, profile: _Profile, half: float, cls: int, paint: Color
    ) -> None:
        self.canvas, self.profile, self.half, self.cls, self.paint = canvas, profile, half, cls, paint
        self.x, self.z = pose.x, pose.z
        self.sin, self.cos = math.sin(pose.heading), math.cos(pose.heading)
        longitudinal = -self.x * self.sin - self.z * self.cos
        lateral = -self.x * self.cos + self.z * self.sin
        self.is_rear_visible = longitudinal < profile[-1][0] / 2
        self.side = 0 if abs(lateral) < half else (1 if lateral > 0 else -1)
        light = canvas.light
        self.end_light = light.facing if abs(self.cos) > 0.5 else light.left
        self.side_light = (light.right if self.side * self.cos > 0 else light.left) if self.side else 1.0

    def point(self, longitudinal: float, lateral: float, y: float) -> Point:
        x = self.x + longitudinal * self.sin + lateral * self.cos
        return self.canvas.point(x, y, self.z + longitudinal * self.cos - lateral * self.sin)

    def paint_shell(self, glass: Color) -> None:
        """Paint the edges from the far end to the near end, then the side."""
        rows = [
            (self.point(a, -self.half, y), self.point(a, self.half, y), kind) for a, y, kind in self.profile
        ]
        edges = list(pairwise(rows))
        plastic = tint(self.paint, 0.35)
        for (l0, r0, kind), (l1, r1, _) in reversed(edges) if self.is_rear_visible else edges:
            quad = [l0, r0, r1, l1]
            if kind == "g":
                self.canvas.add(quad, self.cls, glass, GLASS, self.canvas.light.haze)
            elif kind == "t":
                self.canvas.add(quad, self.cls, tint(self.paint, self.canvas.light.top))
            else:
                self.canvas.add(quad, self.cls, tint(plastic if kind == "p" else self.paint, self.end_light))
        if self.side:
            outline = [row[0] if self.side < 0 else row[1] for row in rows]
            self.canvas.add(outline, self.cls, tint(self.paint, self.side_light))

    def paint_side(self, corners: list[tuple[float, float]], color: Color, glass: bool = False) -> None:
        """Paint a polygon of (longitudinal position, height) corners on the visible side."""
        if self.side:
            points = [self.point(a, self.side * self.half, y) for a, y in corners]
            if glass:
                self.canvas.add(points, self.cls, color, GLASS, self.canvas.light.haze)
            else:
                self.canvas.add(points, self.cls, color)

    def paint_end(
        self, u: tuple[float, float], y: tuple[float, float], color: Color, glass: bool = False
    ) -> None:
        """Paint a rectangle on the visible end; `u` ranges from -1 to 1 across its width."""
        longitudinal = self.profile[0][0] if self.is_rear_visible else self.profile[-1][0]
        h = self.half
        points = [self.point(longitudinal, u[i] * h, y[j]) for i, j in ((0, 0), (1, 0), (1, 1), (0, 1))]
        if glass:
            self.canvas.add(points, self.cls, color, GLASS, self.canvas.light.haze)
        else:
            self.canvas.add(points, self.cls, color)

    def paint_wheels(self, positions: list[float], radius: float) -> None:
        """Paint tires and rims on the visible side, and tires below the visible end."""
        tire, rim = (0.035, 0.035, 0.04), (0.4, 0.4, 0.42)
        for u in (-0.95, 0.68):
            self.paint_end((u, u + 0.27), (0.0, radius), tire)
        for a in positions if self.side else ():
            self.paint_side([(a + radius * u, radius + radius * v) for u, v in _WHEEL], tire)
            self.paint_side([(a + radius * 0.6 * u, radius + radius * 0.6 * v) for u, v in _WHEEL], rim)

    def paint_lights(self, y: tuple[float, float], width: float) -> None:
        """Paint the lights and the license plate on the visible end."""
        glow = 1.5 if self.canvas.light.dusk else 0.75
        lamp = (0.75 * glow, 0.05, 0.04) if self.is_rear_visible else (0.95 * glow, 0.95 * glow, 0.88 * glow)
        self.paint_end((-0.97, -0.97 + width), y, lamp)
        self.paint_end((0.97 - width, 0.97), y, lamp)
        self.paint_end((-0.26, 0.26), (y[0] - 0.18, y[0] - 0.05), (0.85, 0.85, 0.8))


_WHEEL = [(math.cos(i * math.pi / 5), math.sin(i * math.pi / 5)) for i in range(10)]


def _shadow(canvas: Canvas, pose: Pose, length: float, half: float) -> None:
    x = pose.x + length / 2 * math.sin(pose.heading)
    z = pose.z + length / 2 * math.cos(pose.heading)
    is_crossing = abs(math.sin(pose.heading)) > 0.5
    rx, rz = (length * 0.56, half * 1.2) if is_crossing else (half * 1.25, length * 0.56)
    canvas.ground_octagon(
        x - 0.25 * canvas.light.sun_side, max(z, rz + 1.5), rx, rz, ROAD, (0.07, 0.07, 0.075), ASPHALT
    )


def _place_vehicle(canvas: Canvas, pose: Pose, length: float, half: float) -> Pose:
    """Set the painting order, draw the shadow, and return the pose with `z` at the center of the rear."""
    canvas.set_layer(OBJECTS, pose.z)
    back = max(0.0, -length * math.cos(pose.heading)) + half * abs(math.sin(pose.heading))
    pose = pose._replace(z=pose.z + back)
    _shadow(canvas, pose, length, half)
    return pose


def draw_car(canvas: Canvas, r: Random, pose: Pose) -> None:
    """Draw a car or van of a random type and color."""
    profile = r.choice((_SEDAN, _HATCH, _HATCH, _WAGON, _WAGON, _VAN))
    length = profile[-1][0]
    paint = random_color(r, 0.64, 0.06, 0.06)
    glass = r.choice(((0.05, 0.06, 0.07), (0.12, 0.14, 0.16), (0.22, 0.25, 0.28)))
    pose = _place_vehicle(canvas, pose, length, 0.88)
    body = _Body(canvas, pose, profile, 0.88, CAR, paint)
    body.paint_shell(glass)
    _car_side(body, profile, glass, panel=profile is _VAN and r.random() < 0.5)
    body.paint_wheels([0.19 * length, 0.81 * length], 0.32)
    low = profile[1][1] + (0.08 if body.is_rear_visible else -0.02)
    body.paint_lights((low, low + 0.2), r.uniform(0.2, 0.36))
    if not body.is_rear_visible:
        body.paint_end((-0.5, 0.5), (0.45, 0.62), (0.04, 0.04, 0.045))
    for u in (-1.14, 1.0):
        a = (0.62 if profile is _SEDAN else 0.66) * length
        tip = [body.point(a, (u + d) * 0.88, y) for d, y in ((0, 0.95), (0.14, 0.95), (0.14, 1.1), (0, 1.1))]
        canvas.add(tip, CAR, tint(paint, 0.6))


def _car_side(body: _Body, profile: _Profile, glass: Color, panel: bool) -> None:
    """Paint the side windows (between the two glass edges), the pillars, the sill and the door gaps."""
    edges = [i for i, corner in enumerate(profile) if corner[2] == "g"]
    rear, front = edges[0], edges[1]
    (a0, y0, _), (a1, y1, _), (a2, y2, _), (a3, y3, _) = (
        profile[rear], profile[rear + 1], profile[front], profile[front + 1],
    )  # fmt: skip
    low = max(y0, y3) + 0.02
    start = a0 + 0.55 * (a2 - a1) if panel else a0 + 0.22
    body.paint_side([(start, low), (max(a1 + 0.08, start), y1 - 0.1), (a2 - 0.05, y2 - 0.1), (a3 - 0.2, low)],
                 glass, glass=True)  # fmt: skip
    for fraction in (0.36, 0.68):
        a = a1 + fraction * (a3 - a1)
        body.paint_side([(a - 0.05, low - 0.5), (a + 0.05, low - 0.5), (a + 0.04, y1), (a - 0.04, y1)],
                     tint(body.paint, body.side_light * 0.72))  # fmt: skip
    end = profile[-1][0]
    body.paint_side([(0, 0.3), (0, 0.42), (end, 0.42), (end, 0.3)], tint(body.paint, 0.35))


def draw_truck(canvas: Canvas, r: Random, pose: Pose) -> None:
    """Draw a truck with a cab and a box, a tarpaulin or an open load bed."""
    length, height = r.uniform(4.5, 8.0), r.uniform(2.7, 3.7)
    load = r.choice(("box", "box", "tarp", "bed"))
    pose = _place_vehicle(canvas, pose, length + 2, 1.2)
    cab = Pose(pose.x + (length + 0.2) * math.sin(pose.heading),
               pose.z + (length + 0.2) * math.cos(pose.heading), pose.heading)  # fmt: skip
    half = 1.2
    paint = random_color(r, 0.5, 0.1, 0.1)
    front = _Body(canvas, cab, _CAB, half - 0.08, TRUCK, paint)
    box_paint = random_color(r, 0.6, 0.1, 0.1)
    box = _Body(canvas, pose, _box(length, 0.9, 1.7 if load == "bed" else height), half, TRUCK, box_paint)
    if box.is_rear_visible:
        _cab(front)
        _load(box, length, load, r)
    else:
        _load(box, length, load, r)
        _cab(front)


def _cab(cab: _Body) -> None:
    cab.paint_shell((0.08, 0.09, 0.1))
    cab.paint_side([(0.5, 1.5), (0.5, 2.2), (1.3, 2.2), (1.6, 1.5)], (0.08, 0.09, 0.1), glass=True)
    cab.paint_wheels([1.1], 0.48)
    if not cab.is_rear_visible:
        cab.paint_lights((0.75, 0.98), 0.3)
        cab.paint_end((-0.6, 0.6), (0.9, 1.3), (0.05, 0.05, 0.055))


def _load(box: _Body, length: float, load: str, r: Random) -> None:
    dark = (0.06, 0.06, 0.065)
    for a in (0.0, length):
        chassis = [
            box.point(a, w * box.half, y) for w, y in ((-0.9, 0.5), (0.9, 0.5), (0.9, 0.95), (-0.9, 0.95))
        ]
        box.canvas.add(chassis, TRUCK, dark)
    box.paint_side([(0, 0.5), (0, 0.95), (length, 0.95), (length, 0.5)], dark)
    box.paint_shell(dark)
    top = box.profile[1][1]
    if load == "tarp":
        for i in range(1, 6):
            a = length * i / 6
            box.paint_side([(a, 0.95), (a, top), (a + 0.08, top), (a + 0.08, 0.95)], tint(box.paint, 0.6))
    elif load == "box":
        stripe = random_color(r, 0.2, 0.2, 0.2)
        y = r.uniform(1.3, 2.0)
        box.paint_side([(0.4, y), (0.4, y + 0.7), (length * 0.8, y + 0.7), (length * 0.8, y)], stripe)
    if box.is_rear_visible:
        box.paint_end((-0.03, 0.03), (1.0, top - 0.1), tint(box.paint, 0.45))
        box.paint_end((-0.95, 0.95), (0.9, 1.0), tint(box.paint, 0.5))
        box.paint_lights((0.72, 0.86), 0.25)
    box.paint_wheels([0.2 * length, 0.34 * length], 0.48)


def draw_bus(canvas: Canvas, r: Random, pose: Pose) -> None:
    """Draw a city bus with a band of windows, doors, wheels and a destination sign."""
    length = r.uniform(9.0, 13.0)
    paint = random_color(r, 0.35, 0.15, 0.12)
    pose = _place_vehicle(canvas, pose, length, 1.27)
    body = _Body(canvas, pose, _box(length, 0.38, r.uniform(2.9, 3.2)), 1.27, BUS, paint)
    _carriage(body, length, (1.35, 2.45), 6, r)
    body.paint_wheels([0.22 * length, 0.78 * length], 0.48)
    body.paint_lights((0.75, 0.98), 0.16)


def draw_train(canvas: Canvas, r: Random, pose: Pose) -> None:
    """Draw a tram of one to three carriages, with skirts down to the rails and a pantograph."""
    paint = random_color(r, 0.35, 0.15, 0.12)
    length, cars = r.uniform(8.0, 12.0), r.randint(1, 3)
    pose = _place_vehicle(canvas, pose, length * cars, 1.2)
    order = range(cars) if math.cos(pose.heading) < 0 else reversed(range(cars))
    for i in order:
        offset = i * (length + 0.5)
        car_pose = Pose(
            pose.x + offset * math.sin(pose.heading), pose.z + offset * math.cos(pose.heading), pose.heading
        )
        body = _Body(canvas, car_pose, _box(length, 0.16, 3.25), 1.2, TRAIN, paint)
        _carriage(body, length, (1.2, 2.5), 5, r)
        arm = [
            body.point(length / 2 + d, w, y)
            for d, w, y in ((0, -0.1, 3.25), (0.9, -0.1, 4.6), (0.9, 0.1, 4.6))
        ]
        canvas.add(arm, TRAIN, (0.08, 0.08, 0.08))
        body.paint_end(
            (-0.12, 0.12), (0.7, 0.95), (1.0, 0.95, 0.8) if not body.is_rear_visible else (0.6, 0.1, 0.1)
        )


def _carriage(body: _Body, length: float, band: tuple[float, float], windows: int, r: Random) -> None:
    """Paint the shell, the window band, the doors, a stripe and the windshield of a bus or tram."""
    dark = (0.06, 0.07, 0.08)
    body.paint_shell(dark)
    stripe = random_color(r, 0.3, 0.1, 0.15)
    body.paint_side([(0, 0.45), (0, 0.9), (length, 0.9), (length, 0.45)], tint(stripe, body.side_light))
    body.paint_side(
        [(0.15, band[0]), (0.15, band[1]), (length - 0.2, band[1]), (length - 0.2, band[0])], dark, True
    )
    step = length / windows
    for i in range(1, windows):
        a = i * step
        door = 0.45 if i % 3 == 1 else 0.06
        color = tint(stripe if door > 0.1 else body.paint, body.side_light * 0.8)
        low = 0.4 if door > 0.1 else band[0]
        body.paint_side([(a - door, low), (a - door, band[1]), (a + door, band[1]), (a + door, low)], color)
        if door > 0.1:
            for d in (-0.38, 0.04):
                pane = [(a + d, 0.6), (a + d, 2.35), (a + d + 0.33, 2.35), (a + d + 0.33, 0.6)]
                body.paint_side(pane, dark, True)
    body.paint_end((-0.9, 0.9), (band[0] - 0.1, band[1] + 0.05), dark, True)
    body.paint_end((-0.6, 0.6), (band[1] + 0.12, band[1] + 0.4), (0.05, 0.05, 0.03))
    body.paint_end((-0.35, 0.4), (band[1] + 0.18, band[1] + 0.33), (0.9, 0.6, 0.1))
    body.paint_end((-0.95, 0.95), (0.42, 0.62), tint(stripe, body.end_light))
