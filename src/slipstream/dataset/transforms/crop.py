"""Geometric transforms as one crop-resize: what they do is composed first, and only what will be seen is computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from slipstream.dataset.transforms.resize import Box, Pair, Pixels, bilinear, nearest

__all__ = ["Geometric", "Pixels", "Sample", "Window"]

# {"image": uint8 (H, W, 3) RGB, "mask": uint8 (H, W)}
Sample: TypeAlias = dict[str, Pixels]


@dataclass(frozen=True)
class Window:
    """Which pixels of a source make up a picture: resized, then cut, then laid on a canvas, then mirrored.

    Sizes are (width, height), boxes (left, top, right, bottom). `resized`, `padded`, `cropped` and `flipped` return
    the window after one more transform, or None where a window cannot say it: it must be rendered first.
    """

    source: Pair
    """Size of the source."""
    scaled: Pair
    """Size that the whole source would have, resized."""
    part: Box
    """What is seen of the resized source."""
    canvas: Pair
    """Size of the result."""
    at: Pair
    """Where on the canvas the part's left top corner lies."""
    fill: tuple[int, int, int, int] | None = None
    """Red, green, blue and class id of the canvas around the part, if it was ever padded."""
    mirrored: bool = False
    """Whether the canvas is mirrored, left to right, at the end."""
    mirrored_first: bool = False
    """Whether the source was mirrored before it was resized; nearest neighbours break ties to the right."""

    @classmethod
    def whole(cls, mask: Pixels) -> Window:
        """Return the window through which the source of this mask is seen as it is."""
        height, width = mask.shape
        return cls((width, height), (width, height), (0, 0, width, height), (width, height), (0, 0))

    @property
    def untouched(self) -> bool:
        """Whether the whole source is seen, unresized and unpadded, if perhaps mirrored."""
        return self.scaled == self.canvas == self.source and self.part == (0, 0, *self.source)

    @property
    def picture(self) -> Box:
        """Where on the canvas there is no padding."""
        width, height = self.part[2] - self.part[0], self.part[3] - self.part[1]
        left = self.canvas[0] - self.at[0] - width if self.mirrored else self.at[0]
        return left, self.at[1], left + width, self.at[1] + height

    def resized(self, size: Pair) -> Window | None:
        """Resize what is seen."""
        if size == self.canvas:
            return self
        if not self.untouched:
            return None
        return Window(
            self.source, size, (0, 0, *size), size, (0, 0), None, self.mirrored, mirrored_first=self.mirrored
        )

    def padded(self, left: int, top: int, size: Pair, fill: tuple[int, int, int, int]) -> Window | None:
        """Lay what is seen on a larger canvas."""
        if self.fill not in (None, fill):
            return None
        if self.mirrored:
            left = size[0] - self.canvas[0] - left
        return replace(self, canvas=size, at=(self.at[0] + left, self.at[1] + top), fill=fill)

    def cropped(self, left: int, top: int, size: Pair) -> Window:
        """Cut a rectangle out of what is seen."""
        if self.mirrored:
            left = self.canvas[0] - size[0] - left
        x, part_left, part_right = _cut(self.at[0], self.part[0], self.part[2], left, size[0])
        y, part_top, part_bottom = _cut(self.at[1], self.part[1], self.part[3], top, size[1])
        part = (part_left, part_top, part_right, part_bottom)
        return replace(self, part=part, canvas=size, at=(x, y))

    def flipped(self) -> Window:
        """Mirror what is seen, left to right."""
        return replace(self, mirrored=not self.mirrored)

    def rendered(self, sample: Sample) -> Sample:
        """Return the sample as seen through the window; the very same one if nothing is to be done."""
        if self.untouched and not self.mirrored:
            return sample
        planes, mask = self.render(sample)
        return {"image": planes.transpose(1, 2, 0), "mask": mask}

    def render(self, sample: Sample) -> tuple[Pixels, Pixels]:
        """Return new arrays with what is seen: the image's channels, uint8 (3, H, W), and the mask, uint8 (H, W).

        Of the sample's arrays, which may be memory-mapped, only what will be seen is read. The image is resampled
        bilinearly, with antialiasing where it shrinks, as Pillow would the whole, but for rounding (see `bilinear`);
        the mask takes nearest neighbours, exactly as Pillow would.
        """
        width, height = self.canvas
        left, top, right, bottom = self.part
        planes, mask = np.empty((3, height, width), np.uint8), np.empty((height, width), np.uint8)
        inside = (
            slice(self.at[1], self.at[1] + bottom - top),
            slice(self.at[0], self.at[0] + right - left),
        )
        if self.fill is not None and (right - left, bottom - top) != self.canvas:
            planes[:] = np.array(self.fill[:3], np.uint8)[:, None, None]
            mask[:] = self.fill[3]
        if right > left and bottom > top:
            step = -1 if self.mirrored else 1
            shown_planes, shown_mask = planes[:, :, ::step], mask[:, ::step]
            part = bilinear(sample["image"], self.scaled, self.part)
            shown_planes[:, *inside] = part.transpose(2, 0, 1)
            shown_mask[inside] = nearest(sample["mask"], self.scaled, self.part, self.mirrored_first)
        return planes, mask


class Geometric(ABC):
    """A transform that moves pixels: called with a sample it transforms it, and with `place` only says how."""

    @abstractmethod
    def place(self, window: Window, rng: np.random.Generator) -> Window | None:
        """Return the window after this transform; None, before anything is drawn, if it must be rendered first."""

    def alone(self, mask: Pixels, rng: np.random.Generator) -> Window:
        """Return the window of this transform only, for a sample with this mask."""
        window = self.place(Window.whole(mask), rng)
        assert window is not None, "a whole sample can be transformed in every way"
        return window

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the transformed sample."""
        return self.alone(sample["mask"], rng).rendered(sample)


def _cut(at: int, first: int, last: int, start: int, length: int) -> tuple[int, int, int]:
    """Return, along one axis, where the part [first, last) at `at` lies in the cut, and what is left of it."""
    hidden = max(0, start - at)
    at = max(0, at - start)
    first = min(first + hidden, last)
    return min(at, length), first, max(first, min(last, first + length - at))
