"""A part of a resized picture, without resizing the rest of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.extras import extra

__all__ = ["Box", "Pair", "Pixels", "bilinear", "nearest"]

Pixels: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Pair: TypeAlias = tuple[int, int]
Box: TypeAlias = tuple[int, int, int, int]

_WASTE = 2  # torch resizes a pixel more than twice as fast as Pillow


def bilinear(image: Pixels, scaled: Pair, part: Box) -> Pixels:
    """Return the box `part` of the image resized to `scaled`, uint8 (h, w, 3); it may be a view.

    That is what Pillow makes of the whole image, antialiased where it shrinks, but for rounding: by at most one grey
    level, and rarely, in noise, by two. Only the source pixels on which the part depends are read,
    or those from there to the nearer edges.

    Args:
        image: uint8 (H, W, 3).
        scaled: (width, height).
        part: left, top, right, bottom in the resized image; not empty.
    """
    height, width = image.shape[:2]
    left, top, right, bottom = part
    if scaled == (width, height):
        return image[top:bottom, left:right]
    x, y = _Axis(left, right, width, scaled[0]), _Axis(top, bottom, height, scaled[1])
    wasteful = x.from_edge * y.from_edge > _WASTE * (right - left) * (bottom - top)
    if wasteful or x.stuck or y.stuck:
        return _by_pillow(image, x, y)
    return _by_torch(image, x, y)


def nearest(mask: Pixels, scaled: Pair, part: Box, mirrored_first: bool) -> Pixels:
    """Return the box `part` of the mask resized to `scaled`, exactly as Pillow resizes the whole.

    Args:
        mask: uint8 (H, W).
        scaled: (width, height).
        part: left, top, right, bottom in the resized mask; not empty.
        mirrored_first: mirror the mask before it is resized, and back afterwards, which breaks ties to the right.
    """
    height, width = mask.shape
    left, top, right, bottom = part
    if scaled == (width, height):
        return mask[top:bottom, left:right]
    columns, rows = _nearest(width, scaled[0]), _nearest(height, scaled[1])
    if mirrored_first:
        columns = width - 1 - columns[::-1]
    columns, rows = columns[left:right], rows[top:bottom]
    needed = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    result: Pixels = needed.take(rows - rows[0], axis=0).take(columns - columns[0], axis=1)
    return result


@dataclass(frozen=True)
class _Axis:
    """The pixels [first, last) of `scaled` ones along one axis, made of `source` ones."""

    first: int
    last: int
    source: int
    scaled: int

    @property
    def needed(self) -> tuple[int, int]:
        """Which source pixels they depend on.

        The filter reaches one pixel to each side, of the source or of the result, whichever is larger; one more is
        for what rounding may do.
        """
        reach = max(1.0, self.source / self.scaled) + 1
        begin, end = self.first * self.source / self.scaled, self.last * self.source / self.scaled
        return max(0, math.floor(begin - reach)), min(self.source, math.ceil(end + reach))

    @property
    def backwards(self) -> bool:
        """Whether the end is the nearer edge."""
        return self.last > self.scaled - self.first

    @property
    def from_edge(self) -> int:
        """How many resized pixels it is from the nearer edge to the far end of these."""
        return self.scaled - self.first if self.backwards else self.last

    @property
    def to_edge(self) -> slice:
        """The source pixels from the nearer edge to the far end of those that are needed."""
        low, high = self.needed
        return slice(low, self.source) if self.backwards else slice(0, high)

    @property
    def scale(self) -> float:
        """The factor, rounded up so that torch, which multiplies and rounds down, does not lose the last pixel."""
        return math.nextafter(self.scaled / self.source, math.inf)

    @property
    def stuck(self) -> bool:
        """Whether torch would copy the pixels: it does where their number stays the same, whatever the factor."""
        length = self.to_edge.stop - self.to_edge.start
        return self.scaled != self.source and math.floor(length * self.scale) == length


def _by_torch(image: Pixels, x: _Axis, y: _Axis) -> Pixels:
    """Resize from the nearest corner on, since torch's pixels can only be counted from one."""
    # In rows of pixels, for which torch has fast code, and writable, since it warns of what is not.
    source = np.require(image[y.to_edge, x.to_edge], requirements=["C", "W"])
    images = torch.from_numpy(source).permute(2, 0, 1)[None]
    scale = [y.scale, x.scale]
    turned = F.interpolate(_turned(images, x, y), scale_factor=scale, mode="bilinear", antialias=True)
    cut = turned[:, :, *(slice(a.from_edge - (a.last - a.first), a.from_edge) for a in (y, x))]
    result: Pixels = _turned(cut, x, y)[0].permute(1, 2, 0).numpy()
    return result


def _turned(images: Tensor, x: _Axis, y: _Axis) -> Tensor:
    """Return the images (N, 3, H, W) with their nearest corner at the left top, or back again."""
    backwards = [dim for dim, axis in ((2, y), (3, x)) if axis.backwards]
    return images.flip(backwards) if backwards else images


def _by_pillow(image: Pixels, x: _Axis, y: _Axis) -> Pixels:
    (x0, x1), (y0, y1) = x.needed, y.needed
    corners = [
        p * axis.source / axis.scaled for p, axis in ((x.first, x), (y.first, y), (x.last, x), (y.last, y))
    ]
    box = (corners[0] - x0, corners[1] - y0, min(corners[2], x1) - x0, min(corners[3], y1) - y0)
    with extra("images"):
        from PIL import Image

    source, size = Image.fromarray(image[y0:y1, x0:x1]), (x.last - x.first, y.last - y.first)
    return np.asarray(source.resize(size, Image.Resampling.BILINEAR, box))


def _nearest(source: int, scaled: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Return the source pixel that Pillow takes for each resized one.

    It adds up the pixels' distance rather than to multiply it, and which neighbour a pixel in the middle between two
    gets depends on the rounding in that sum.
    """
    distances = np.full(scaled, source / scaled)
    distances[0] /= 2
    return np.add.accumulate(distances).astype(np.intp)
