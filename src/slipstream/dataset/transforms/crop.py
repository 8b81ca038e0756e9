"""Geometric transforms, composed into a single crop-and-resize operation on the visible pixels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from slipstream.dataset.transforms.resize import Box, Pair, Pixels, bilinear, nearest

__all__ = ["CropRegion", "Geometric", "Pixels", "Sample"]

# {"image": uint8 (H, W, 3) RGB, "mask": uint8 (H, W)}
Sample: TypeAlias = dict[str, Pixels]


@dataclass(frozen=True)
class CropRegion:
    """A crop region of the resized image. The source is resized, cropped, placed on a canvas, and then mirrored.

    Sizes are (width, height), and boxes are (left, top, right, bottom). The `resized`, `padded`, `cropped` and
    `flipped` methods return the region with one more transform applied. The first two return None if a single region
    cannot represent the result; the sample must then be rendered first.
    """

    source: Pair
    """Size of the source image."""
    scaled: Pair
    """Size of the whole source after resizing."""
    box: Box
    """Visible box of the resized source."""
    canvas: Pair
    """Size of the output."""
    offset: Pair
    """Position (left, top) of the box on the canvas."""
    fill: tuple[int, int, int, int] | None = None
    """Red, green, blue and class id of the padding around the box; None if there is no padding."""
    mirrored: bool = False
    """Whether the canvas is mirrored left to right at the end."""
    mirrored_first: bool = False
    """Whether the source was mirrored before it was resized. Nearest-neighbor ties are then resolved to the right."""

    @classmethod
    def identity(cls, mask: Pixels) -> CropRegion:
        """Return the region that leaves a sample with this mask unchanged."""
        height, width = mask.shape
        return cls((width, height), (width, height), (0, 0, width, height), (width, height), (0, 0))

    @property
    def covers_source(self) -> bool:
        """Whether the region covers the whole source without resizing or padding; it may be mirrored."""
        return self.scaled == self.canvas == self.source and self.box == (0, 0, *self.source)

    @property
    def image_box(self) -> Box:
        """Box of the image on the canvas, without the padding."""
        width, height = self.box[2] - self.box[0], self.box[3] - self.box[1]
        left = self.canvas[0] - self.offset[0] - width if self.mirrored else self.offset[0]
        return left, self.offset[1], left + width, self.offset[1] + height

    def resized(self, size: Pair) -> CropRegion | None:
        """Return the region resized to `size`."""
        if size == self.canvas:
            return self
        if not self.covers_source:
            return None
        return CropRegion(
            self.source, size, (0, 0, *size), size, (0, 0), None, self.mirrored, mirrored_first=self.mirrored
        )

    def padded(self, left: int, top: int, size: Pair, fill: tuple[int, int, int, int]) -> CropRegion | None:
        """Return the region padded to `size`, with `left` pixels on the left and `top` pixels at the top."""
        if self.fill not in (None, fill):
            return None
        if self.mirrored:
            left = size[0] - self.canvas[0] - left
        return replace(self, canvas=size, offset=(self.offset[0] + left, self.offset[1] + top), fill=fill)

    def cropped(self, left: int, top: int, size: Pair) -> CropRegion:
        """Return the region cropped to a rectangle of `size` at (`left`, `top`)."""
        if self.mirrored:
            left = self.canvas[0] - size[0] - left
        x, box_left, box_right = _crop_axis(self.offset[0], self.box[0], self.box[2], left, size[0])
        y, box_top, box_bottom = _crop_axis(self.offset[1], self.box[1], self.box[3], top, size[1])
        box = (box_left, box_top, box_right, box_bottom)
        return replace(self, box=box, canvas=size, offset=(x, y))

    def flipped(self) -> CropRegion:
        """Return the region mirrored left to right."""
        return replace(self, mirrored=not self.mirrored)

    def apply(self, sample: Sample) -> Sample:
        """Return the transformed sample, or `sample` itself if nothing changes."""
        if self.covers_source and not self.mirrored:
            return sample
        planes, mask = self.render(sample)
        return {"image": planes.transpose(1, 2, 0), "mask": mask}

    def render(self, sample: Sample) -> tuple[Pixels, Pixels]:
        """Return new arrays: the image, uint8 (3, H, W), and the mask, uint8 (H, W).

        Only visible pixels of the sample's arrays, which may be memory-mapped, are read. The image is resampled
        bilinearly, with antialiasing when it shrinks, matching Pillow up to rounding (see `bilinear`). The mask is
        resampled with nearest-neighbor interpolation, exactly as in Pillow.
        """
        width, height = self.canvas
        left, top, right, bottom = self.box
        planes, mask = np.empty((3, height, width), np.uint8), np.empty((height, width), np.uint8)
        inside = (
            slice(self.offset[1], self.offset[1] + bottom - top),
            slice(self.offset[0], self.offset[0] + right - left),
        )
        if self.fill is not None and (right - left, bottom - top) != self.canvas:
            planes[:] = np.array(self.fill[:3], np.uint8)[:, None, None]
            mask[:] = self.fill[3]
        if right > left and bottom > top:
            step = -1 if self.mirrored else 1
            oriented_planes, oriented_mask = planes[:, :, ::step], mask[:, ::step]
            crop = bilinear(sample["image"], self.scaled, self.box)
            oriented_planes[:, *inside] = crop.transpose(2, 0, 1)
            oriented_mask[inside] = nearest(sample["mask"], self.scaled, self.box, self.mirrored_first)
        return planes, mask


class Geometric(ABC):
    """Base class for transforms that move pixels.

    Subclasses define `update_region`; `__call__` transforms a sample.
    """

    @abstractmethod
    def update_region(self, region: CropRegion, rng: np.random.Generator) -> CropRegion | None:
        """Return the region after this transform.

        If the region must be rendered first, return None without drawing random numbers.
        """

    def region_for(self, mask: Pixels, rng: np.random.Generator) -> CropRegion:
        """Return the region after this transform alone, for a sample with this mask."""
        region = self.update_region(CropRegion.identity(mask), rng)
        assert region is not None, "a region that covers the whole sample supports every transform"
        return region

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the transformed sample."""
        return self.region_for(sample["mask"], rng).apply(sample)


def _crop_axis(offset: int, first: int, last: int, start: int, length: int) -> tuple[int, int, int]:
    """Crop one axis, and return the new (offset, first, last) of the visible pixels [first, last)."""
    hidden = max(0, start - offset)
    offset = max(0, offset - start)
    first = min(first + hidden, last)
    return min(offset, length), first, max(first, min(last, first + length - offset))
