"""Pedestrians, bicycles, motorcycles and their riders: articulated figures at a constant depth."""

from __future__ import annotations

from random import Random

from slipstream.zoo.street_scenes.canvas import (
    ASPHALT,
    OBJECTS,
    PAVING,
    SPOKES,
    Canvas,
    Color,
    Point,
    random_color,
    tint,
)

__all__ = ["draw_cycle", "draw_person"]

PERSON, RIDER, MOTORCYCLE, BICYCLE = 11, 12, 17, 18

_SKINS: tuple[Color, ...] = ((0.85, 0.66, 0.54), (0.72, 0.5, 0.38), (0.5, 0.33, 0.23), (0.3, 0.2, 0.15))
_HAIR: tuple[Color, ...] = ((0.06, 0.05, 0.05), (0.22, 0.14, 0.08), (0.6, 0.45, 0.25), (0.6, 0.6, 0.6))
_CAP = ((-1.05, 0.1), (-0.95, -0.7), (-0.4, -1.15), (0.4, -1.15), (0.95, -0.7), (1.05, 0.1), (0.5, -0.35))
_RING = ((1, 0), (0.87, 0.5), (0.5, 0.87), (0, 1), (-0.5, 0.87), (-0.87, 0.5),
         (-1, 0), (-0.87, -0.5), (-0.5, -0.87), (0, -1), (0.5, -0.87), (0.87, -0.5))  # fmt: skip
_BLACK = (0.05, 0.05, 0.055)


def _clothes(r: Random) -> Color:
    return tint(random_color(r, 0.5, 0.14, 0.1), r.uniform(0.35, 1.0))


class _Figure:
    """A figure drawn as limbs between points. Points are (right, up) offsets from the foot in meters.

    `squeeze` scales the horizontal axis: an absolute value below 1 shows the figure at an angle instead of from the
    side, and a negative value mirrors it.
    """

    def __init__(self, canvas: Canvas, x: float, z: float, scale: float = 1.0, squeeze: float = 1.0) -> None:
        self.canvas, self.x, self.z, self.scale, self.squeeze = canvas, x, z, scale, squeeze
        canvas.set_layer(OBJECTS, z)

    def point(self, u: float, v: float) -> Point:
        return self.canvas.point(self.x + u * self.scale * self.squeeze, v * self.scale, self.z)

    def limb(self, a: Point, b: Point, width: Point, cls: int, color: Color) -> None:
        k = self.scale
        self.canvas.limb(self.point(*a), self.point(*b), width[0] * k, width[1] * k, cls, color)

    def head(self, u: float, v: float, cls: int, skin: Color, hair: Color) -> None:
        self.limb((u, v - 0.2), (u, v), (0.11, 0.1), cls, tint(skin, 0.75))
        self.canvas.disc(self.point(u, v), 0.12 * self.scale, cls, skin)
        self.canvas.disc(self.point(u, v), 0.125 * self.scale, cls, hair, _CAP)


def draw_person(canvas: Canvas, r: Random, x: float, z: float, ground: int) -> None:
    """Draw a walking or standing pedestrian at (x, z) on ground of class `ground`."""
    scale = r.uniform(0.88, 1.1) if r.random() < 0.88 else r.uniform(0.55, 0.78)
    figure = _Figure(canvas, x, z, scale, r.choice((-1.0, 1.0)))
    canvas.ground_octagon(
        x - 0.15 * canvas.light.sun_side, z, 0.4, 0.25, ground, (0.1, 0.1, 0.1), PAVING if ground else ASPHALT
    )
    stride = r.choice((0.0, 0.06, 0.2, 0.28))
    top, legs, skin, hair = _clothes(r), _clothes(r), r.choice(_SKINS), r.choice(_HAIR)
    for sign, shade in ((-1, 0.7), (1, 1.0)):
        knee, foot = (sign * stride * 0.6 + 0.04, 0.5), (sign * (stride + 0.08), 0.07)
        figure.limb((sign * 0.09, 0.92), knee, (0.19, 0.14), PERSON, tint(legs, shade))
        figure.limb(knee, foot, (0.14, 0.1), PERSON, tint(legs, shade * 0.9))
        figure.limb((foot[0] - 0.05, 0.04), (foot[0] + 0.14, 0.03), (0.1, 0.06), PERSON, _BLACK)
    _arm(figure, -1, stride, tint(top, 0.65), skin)
    _extras(figure, r, top)
    figure.limb((0.02, 1.47), (0, 0.86), (0.42, 0.33), PERSON, top)
    figure.limb((0.05, 1.47), (0.04, 0.95), (0.1, 0.06), PERSON, tint(top, 1.25))
    _arm(figure, 1, stride, tint(top, 0.85), skin)
    figure.head(0.03, 1.63, PERSON, skin, hair)


def _extras(figure: _Figure, r: Random, top: Color) -> None:
    """Randomly paint a bag, a skirt or a coat."""
    pick = r.random()
    if pick < 0.22:
        figure.limb((-0.22, 1.4), (-0.24, 0.95), (0.2, 0.26), PERSON, _clothes(r))
    elif pick < 0.45:
        figure.limb((0, 1.0), (0, 0.5), (0.34, 0.52), PERSON, tint(top, 0.88))
    elif pick < 0.55:
        figure.limb((0.36, 0.85), (0.36, 0.45), (0.28, 0.3), PERSON, _clothes(r))


def _arm(figure: _Figure, sign: int, stride: float, sleeve: Color, skin: Color) -> None:
    elbow = (sign * 0.26 - sign * stride * 0.3, 1.13)
    hand = (sign * 0.26 - sign * stride * 0.8 + 0.08, 0.88)
    figure.limb((sign * 0.2, 1.42), elbow, (0.14, 0.11), PERSON, sleeve)
    figure.limb(elbow, hand, (0.11, 0.08), PERSON, sleeve)
    figure.canvas.disc(figure.point(*hand), 0.055 * figure.scale, PERSON, skin)


def draw_cycle(
    canvas: Canvas, r: Random, x: float, z: float, ground: int, has_motor: bool, has_rider: bool
) -> None:
    """Draw a bicycle or motorcycle at (x, z), seen from the side or at an angle, either parked or with a rider."""
    squeeze = r.choice((-1.0, 1.0)) * r.choice((1.0, 0.85, 0.45, 0.12))
    bike = _Figure(canvas, x, z, r.uniform(0.95, 1.08), squeeze)
    length = max(0.3, 0.9 * abs(squeeze))
    canvas.ground_octagon(x, z, length, 0.3, ground, (0.1, 0.1, 0.1), PAVING if ground else ASPHALT)
    paint = random_color(r, 0.4, 0.1, 0.1)
    (_motorcycle if has_motor else _bicycle)(bike, paint, r)
    if has_rider:
        _rider(bike, r, helmet=has_motor or r.random() < 0.5)


def _wheel(bike: _Figure, u: float, radius: float, thickness: float, cls: int, has_spokes: bool) -> None:
    ring = [bike.point(u + radius * a, radius + radius * b) for a, b in _RING]
    bike.limb((u, 0.0), (u, 2 * radius), (thickness, thickness), cls, _BLACK)
    bike.canvas.add(ring, cls, _BLACK)
    inner = [bike.point(u + (radius - thickness) * a, radius + (radius - thickness) * b) for a, b in _RING]
    bike.canvas.add(inner, cls, (0.35, 0.35, 0.37), SPOKES if has_spokes and bike.z < 25 else 0)


def _bicycle(bike: _Figure, paint: Color, r: Random) -> None:
    for u in (-0.52, 0.52):
        _wheel(bike, u, 0.35, 0.05, BICYCLE, has_spokes=True)
    saddle, crank, head, rear = (-0.2, 0.92), (-0.05, 0.3), (0.38, 0.85), (-0.52, 0.35)
    for a, b in ((saddle, crank), (crank, head), (head, (-0.15, 0.78)), (crank, rear), (rear, (-0.18, 0.8))):
        bike.limb(a, b, (0.06, 0.06), BICYCLE, paint)
    bike.limb(head, (0.52, 0.35), (0.06, 0.06), BICYCLE, tint(paint, 0.8))
    bike.limb((0.36, 0.85), (0.33, 1.05), (0.05, 0.05), BICYCLE, _BLACK)
    bike.limb((0.22, 1.04), (0.42, 1.06), (0.07, 0.07), BICYCLE, _BLACK)
    bike.limb((-0.33, 0.95), (-0.08, 0.96), (0.09, 0.06), BICYCLE, _BLACK)
    if r.random() < 0.35:
        bike.limb((0.5, 1.0), (0.5, 0.75), (0.35, 0.3), BICYCLE, random_color(r, 0.3, 0.5, 0.0))


def _motorcycle(bike: _Figure, paint: Color, r: Random) -> None:
    for u in (-0.65, 0.68):
        _wheel(bike, u, 0.31, 0.13, MOTORCYCLE, has_spokes=False)
    scooter = r.random() < 0.5
    bike.limb((-0.65, 0.35), (0.3, 0.42), (0.3, 0.34), MOTORCYCLE, tint(paint, 0.4))
    bike.limb((-0.85, 0.72), (-0.1, 0.66), (0.24, 0.4), MOTORCYCLE, paint)
    bike.limb((-0.8, 0.84), (0.05, 0.8), (0.14, 0.16), MOTORCYCLE, _BLACK)
    if scooter:
        bike.limb((0.42, 0.2), (0.52, 1.0), (0.42, 0.34), MOTORCYCLE, paint)
    else:
        bike.limb((-0.05, 0.78), (0.42, 0.86), (0.3, 0.3), MOTORCYCLE, tint(paint, 1.15))
        bike.limb((0.42, 0.9), (0.68, 0.31), (0.12, 0.1), MOTORCYCLE, (0.5, 0.5, 0.52))
    bike.limb((0.3, 1.06), (0.5, 1.0), (0.1, 0.12), MOTORCYCLE, _BLACK)
    bike.canvas.disc(bike.point(0.55, 0.92), 0.1, MOTORCYCLE, (0.9, 0.88, 0.8))
    bike.canvas.disc(bike.point(-0.88, 0.7), 0.06, MOTORCYCLE, (0.7, 0.06, 0.05))


def _rider(bike: _Figure, r: Random, helmet: bool) -> None:
    top, legs, skin = _clothes(r), _clothes(r), r.choice(_SKINS)
    hip, chest = (-0.22, 0.98), (0.02, 1.5)
    # If the figure is seen mostly from the front or rear, both legs and both shoulders are visible side by side.
    spread = 0.13 / max(abs(bike.squeeze), 0.12) if abs(bike.squeeze) < 0.5 else 0.0
    for sign, foot in ((-1, (-0.02, 0.18)), (1, (0.02, 0.42))):
        knee = (0.16 + sign * spread, 0.6 + 0.1 * sign)
        shade = 0.7 if sign < 0 else 1.0
        bike.limb(hip, knee, (0.2, 0.15), RIDER, tint(legs, shade))
        u, v = foot[0] + sign * spread * 0.9, foot[1]
        bike.limb(knee, (u, v), (0.14, 0.1), RIDER, tint(legs, shade * 0.9))
        bike.limb((u - 0.05, v - 0.05), (u + 0.14, v - 0.06), (0.09, 0.06), RIDER, _BLACK)
    bike.limb(hip, chest, (0.32, 0.4), RIDER, top)
    if r.random() < 0.3:
        bike.limb((-0.28, 1.1), (-0.14, 1.48), (0.26, 0.24), RIDER, _clothes(r))
    for sign in (-1, 1):
        bike.limb((chest[0] + sign * spread, 1.43), (0.26 + sign * spread * 1.4, 1.2), (0.13, 0.1), RIDER,
                  tint(top, 0.75))  # fmt: skip
        bike.limb((0.26 + sign * spread * 1.4, 1.2), (0.38 + sign * spread, 1.08), (0.1, 0.08), RIDER, skin)
    bike.head(0.08, 1.68, RIDER, skin, random_color(r, 0.5, 0.0, 0.1) if helmet else r.choice(_HAIR))
