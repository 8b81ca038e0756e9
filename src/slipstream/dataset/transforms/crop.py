"""Geometric transforms, composed into a single crop-and-resize operation on the visible pixels."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.extras import extra

Pixels: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Pair: TypeAlias = tuple[int, int]
Box: TypeAlias = tuple[int, int, int, int]
# {"image": uint8 (H, W, 3) RGB, "mask": uint8 (H, W)}
Sample: TypeAlias = dict[str, Pixels]


@dataclass(frozen=True)
class CropRegion:
    """A crop region of the resized image. The source is resized, cropped, placed on a canvas, and then mirrored.

    Sizes are (width, height), and boxes are (left, top, right, bottom). The `resized`, `padded`, `cropped` and
    `flipped` methods return the region with one more transform applied. The first two return None if a single region
    cannot represent the result; the sample must then be rendered first.

    Attributes:
        source: size of the source image.
        scaled: size of the whole source after resizing.
        box: visible box of the resized source.
        canvas: size of the output.
        offset: position (left, top) of the box on the canvas.
        fill: red, green, blue and class id of the padding around the box; None if there is no padding.
        mirrored: whether the canvas is mirrored left to right at the end.
        mirrored_first: whether the source was mirrored before it was resized. Nearest-neighbor ties are then
            resolved to the right.
    """

    source: Pair
    scaled: Pair
    box: Box
    canvas: Pair
    offset: Pair
    fill: tuple[int, int, int, int] | None = None
    mirrored: bool = False
    mirrored_first: bool = False

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


_MAX_OVERHEAD = 2  # per pixel, torch is more than twice as fast as Pillow


def bilinear(image: Pixels, scaled: Pair, box: Box) -> Pixels:
    """Resize the image to `scaled`, and return a box of the result, uint8 (h, w, 3). The result may be a view.

    The result matches the same box of the whole image resized by Pillow (with antialiasing when the image shrinks),
    except for rounding differences of at most one gray level (rarely two, in noisy images). Only the source pixels that
    affect the box and, in some cases, the pixels between the box and the nearest edges are read.

    Args:
        image: uint8 (H, W, 3).
        scaled: (width, height).
        box: (left, top, right, bottom) in the resized image; must not be empty.
    """
    height, width = image.shape[:2]
    left, top, right, bottom = box
    if scaled == (width, height):
        return image[top:bottom, left:right]
    x, y = _Axis(left, right, width, scaled[0]), _Axis(top, bottom, height, scaled[1])
    inefficient = x.length_from_edge * y.length_from_edge > _MAX_OVERHEAD * (right - left) * (bottom - top)
    if inefficient or x.is_copy or y.is_copy:
        return _resize_with_pillow(image, x, y)
    return _resize_with_torch(image, x, y)


def nearest(mask: Pixels, scaled: Pair, box: Box, mirrored_first: bool) -> Pixels:
    """Resize the mask to `scaled`, and return a box of the result, which is identical to Pillow's.

    Args:
        mask: uint8 (H, W).
        scaled: (width, height).
        box: (left, top, right, bottom) in the resized mask; must not be empty.
        mirrored_first: whether to mirror the mask before resizing and again afterwards. Ties are then resolved
            to the right.
    """
    height, width = mask.shape
    left, top, right, bottom = box
    if scaled == (width, height):
        return mask[top:bottom, left:right]
    columns, rows = _nearest_indices(width, scaled[0]), _nearest_indices(height, scaled[1])
    if mirrored_first:
        columns = width - 1 - columns[::-1]
    columns, rows = columns[left:right], rows[top:bottom]
    needed = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return needed.take(rows - rows[0], axis=0).take(columns - columns[0], axis=1)


@dataclass(frozen=True)
class _Axis:
    """The output pixels [first, last) along an axis that is resized from `source` to `scaled` pixels."""

    first: int
    last: int
    source: int
    scaled: int

    @property
    def needed(self) -> tuple[int, int]:
        """Range of source pixels that affect the output pixels.

        The filter extends one pixel to each side, in source or output pixels, whichever is larger; one
        additional source pixel accounts for rounding.
        """
        reach = max(1.0, self.source / self.scaled) + 1
        begin, end = self.first * self.source / self.scaled, self.last * self.source / self.scaled
        return max(0, math.floor(begin - reach)), min(self.source, math.ceil(end + reach))

    @property
    def is_end_nearest(self) -> bool:
        """Whether the end of the axis is the nearest edge."""
        return self.last > self.scaled - self.first

    @property
    def length_from_edge(self) -> int:
        """Number of resized pixels from the nearest edge to the far end of the output pixels."""
        return self.scaled - self.first if self.is_end_nearest else self.last

    @property
    def source_from_edge(self) -> slice:
        """Source pixels from the nearest edge to the far end of the needed pixels."""
        low, high = self.needed
        return slice(low, self.source) if self.is_end_nearest else slice(0, high)

    @property
    def scale(self) -> float:
        """The scale factor, rounded up, because torch rounds the scaled size down and could drop the last pixel."""
        return math.nextafter(self.scaled / self.source, math.inf)

    @property
    def is_copy(self) -> bool:
        """Whether torch would copy the pixels unchanged because the input and output sizes are the same."""
        length = self.source_from_edge.stop - self.source_from_edge.start
        return self.scaled != self.source and math.floor(length * self.scale) == length


def _resize_with_torch(image: Pixels, x: _Axis, y: _Axis) -> Pixels:
    """Resize the source from the nearest corner, because torch aligns the output grid with the input's corner."""
    # A contiguous array lets torch use its fast path for channels-last images. torch warns about read-only arrays.
    source = np.require(image[y.source_from_edge, x.source_from_edge], requirements=["C", "W"])
    images = torch.from_numpy(source).permute(2, 0, 1)[None]
    scale = [y.scale, x.scale]
    resized = F.interpolate(_reorient(images, x, y), scale_factor=scale, mode="bilinear", antialias=True)
    crop = resized[
        :, :, *(slice(a.length_from_edge - (a.last - a.first), a.length_from_edge) for a in (y, x))
    ]
    return _reorient(crop, x, y)[0].permute(1, 2, 0).numpy()


def _reorient(images: Tensor, x: _Axis, y: _Axis) -> Tensor:
    """Flip the images (N, 3, H, W) so that their nearest corner is at the top left; the function is its own inverse."""
    dims = [dim for dim, axis in ((2, y), (3, x)) if axis.is_end_nearest]
    return images.flip(dims) if dims else images


def _resize_with_pillow(image: Pixels, x: _Axis, y: _Axis) -> Pixels:
    (x0, x1), (y0, y1) = x.needed, y.needed
    corners = [
        p * axis.source / axis.scaled for p, axis in ((x.first, x), (y.first, y), (x.last, x), (y.last, y))
    ]
    box = (corners[0] - x0, corners[1] - y0, min(corners[2], x1) - x0, min(corners[3], y1) - y0)
    with extra("images"):
        from PIL import Image

    source, size = Image.fromarray(image[y0:y1, x0:x1]), (x.last - x.first, y.last - y.first)
    return np.asarray(source.resize(size, Image.Resampling.BILINEAR, box))


def _nearest_indices(source: int, scaled: int) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Return the source pixel that Pillow selects for each resized pixel.

    Pillow adds the distance between pixels repeatedly instead of multiplying it. For a position halfway between two
    pixels, the rounding error of this sum determines which neighbor is selected.
    """
    distances = np.full(scaled, source / scaled)
    distances[0] /= 2
    return np.add.accumulate(distances).astype(np.intp)
