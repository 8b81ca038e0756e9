"""Augmentations of images with masks, under SuperGradients' names.

Each is called with a sample, `{"image": uint8 (H, W, 3), "mask": uint8 (H, W)}`, and the sample's generator,
and returns a new sample. Sizes are (width, height), as in SuperGradients' recipes. Images are resampled
bilinearly (with Pillow's antialiasing when they shrink), masks by nearest neighbour.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageEnhance

from slipstream.dataset.base import Sample
from slipstream.errors import ConfigError, DataError
from slipstream.registry import TRANSFORMS

__all__ = [
    "SegColorJitter",
    "SegCropImageAndMask",
    "SegPadShortToCropSize",
    "SegRandomFlip",
    "SegRandomRescale",
    "SegRescale",
]


@TRANSFORMS.register_module()
class SegRandomFlip:
    """Mirror image and mask left to right with probability `prob`."""

    def __init__(self, prob: float = 0.5) -> None:
        if not 0 <= prob <= 1:
            raise ConfigError(f"prob must be 0 to 1, not {prob}")
        self.prob = prob

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample as it is, or mirrored."""
        if rng.random() >= self.prob:
            return sample
        return {"image": sample["image"][:, ::-1], "mask": sample["mask"][:, ::-1]}


@TRANSFORMS.register_module()
class SegRescale:
    """Scale image and mask by a factor, or so that the short or the long side gets a given length.

    Exactly one of the three must be given. Sides are rounded to the nearest pixel.
    """

    def __init__(
        self,
        scale_factor: float | None = None,
        short_size: int | None = None,
        long_size: int | None = None,
    ) -> None:
        given = [value for value in (scale_factor, short_size, long_size) if value is not None]
        if len(given) != 1 or given[0] <= 0:
            raise ConfigError(
                "SegRescale needs exactly one of scale_factor, short_size and long_size, greater than 0; got "
                f"scale_factor={scale_factor}, short_size={short_size}, long_size={long_size}"
            )
        self.scale_factor, self.short_size, self.long_size = scale_factor, short_size, long_size

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample, scaled."""
        sides = sample["mask"].shape
        if self.scale_factor is not None:
            return _rescaled(sample, self.scale_factor)
        if self.short_size is not None:
            return _rescaled(sample, self.short_size / min(sides))
        return _rescaled(sample, (self.long_size or 0) / max(sides))


@TRANSFORMS.register_module()
class SegRandomRescale:
    """Scale image and mask by a factor drawn uniformly from `scales`.

    Args:
        scales: the smallest and the largest factor; a single number s stands for the range between s and 1.
    """

    def __init__(self, scales: float | Sequence[float] = (0.5, 2.0)) -> None:
        bounds = sorted([scales, 1.0] if isinstance(scales, int | float) else scales)
        if len(bounds) != 2 or bounds[0] <= 0:
            raise ConfigError(f"scales must be one or two numbers greater than 0, not {scales!r}")
        self.scales = (bounds[0], bounds[1])

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample, scaled at random."""
        return _rescaled(sample, rng.uniform(*self.scales))


@TRANSFORMS.register_module()
class SegPadShortToCropSize:
    """Pad sides of image and mask that are shorter than the crop; longer sides stay.

    Args:
        crop_size: (width, height), or one number for both.
        fill_mask: the class id of the padding. SuperGradients fills with 0 unless told otherwise; where 0 is
            a class (road, in Cityscapes), that silently teaches that black is road. So it must be given
            here: the data set's `ignore_index`, as a rule.
        fill_image: grey value, or [r, g, b], of the padding.
        padding_mode: 'center' pads both ends alike (the odd pixel goes to the top or left), as
            SuperGradients does; 'random' puts the image anywhere inside the padding.
    """

    def __init__(
        self,
        crop_size: int | Sequence[int],
        fill_mask: int,
        fill_image: int | Sequence[int] = 0,
        padding_mode: Literal["center", "random"] = "center",
    ) -> None:
        self.crop_size = _size(crop_size)
        self.fill_mask = fill_mask
        self.fill_image = (fill_image,) * 3 if isinstance(fill_image, int) else tuple(fill_image)
        if len(self.fill_image) != 3 or not all(0 <= v <= 255 for v in (fill_mask, *self.fill_image)):
            raise ConfigError(
                "fill_mask must be 0 to 255, and fill_image one such number or three; "
                f"got fill_mask={fill_mask!r}, fill_image={fill_image!r}"
            )
        self.padding_mode = _one_of("padding_mode", padding_mode, ("center", "random"))

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample, at least as large as the crop."""
        height, width = sample["mask"].shape
        down, right = max(0, self.crop_size[1] - height), max(0, self.crop_size[0] - width)
        if not down and not right:
            return sample
        if self.padding_mode == "random":
            top, left = int(rng.integers(down + 1)), int(rng.integers(right + 1))
        else:
            top, left = (down + 1) // 2, (right + 1) // 2
        inside = (slice(top, top + height), slice(left, left + width))
        image = np.full((height + down, width + right, 3), self.fill_image, dtype=np.uint8)
        mask = np.full((height + down, width + right), self.fill_mask, dtype=np.uint8)
        image[inside], mask[inside] = sample["image"], sample["mask"]
        return {"image": image, "mask": mask}


@TRANSFORMS.register_module()
class SegCropImageAndMask:
    """Cut the same rectangle out of image and mask.

    Args:
        crop_size: (width, height), or one number for both.
        mode: 'random' draws every possible place with the same probability; 'center' takes the middle.

    Raises:
        DataError: when called with an image smaller than the crop.
    """

    def __init__(self, crop_size: int | Sequence[int], mode: Literal["random", "center"] = "random") -> None:
        self.crop_size = _size(crop_size)
        self.mode = _one_of("mode", mode, ("random", "center"))

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the cut."""
        height, width = sample["mask"].shape
        spare_y, spare_x = height - self.crop_size[1], width - self.crop_size[0]
        if spare_y < 0 or spare_x < 0:
            raise DataError(
                f"cannot crop {self.crop_size[0]} x {self.crop_size[1]} (width x height) out of an image of "
                f"{width} x {height}; put SegPadShortToCropSize before SegCropImageAndMask"
            )
        if self.mode == "random":
            top, left = int(rng.integers(spare_y + 1)), int(rng.integers(spare_x + 1))
        else:
            top, left = spare_y // 2, spare_x // 2
        inside = (slice(top, top + self.crop_size[1]), slice(left, left + self.crop_size[0]))
        return {"image": sample["image"][inside], "mask": sample["mask"][inside]}


@TRANSFORMS.register_module()
class SegColorJitter:
    """Change brightness, contrast and saturation of the image, in random order, as torchvision defines them.

    With a factor f each, the image becomes, cut to whole numbers from 0 to 255: brightness `f * image`;
    contrast `f * image + (1 - f) * g` with g the rounded mean of its grey values (ITU-R 601); saturation
    `f * image + (1 - f) * its grey values`.

    Args:
        brightness, contrast, saturation: the range of f as [smallest, largest]; a single number v stands for
            `[max(0, 1 - v), 1 + v]`, and 0 leaves the image as it is.
    """

    def __init__(
        self,
        brightness: float | Sequence[float] = 0.0,
        contrast: float | Sequence[float] = 0.0,
        saturation: float | Sequence[float] = 0.0,
    ) -> None:
        self.brightness = _factors("brightness", brightness)
        self.contrast = _factors("contrast", contrast)
        self.saturation = _factors("saturation", saturation)

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample with other colours and the same mask."""
        steps: list[tuple[Any, tuple[float, float]]] = [
            (ImageEnhance.Brightness, self.brightness),
            (ImageEnhance.Contrast, self.contrast),
            (ImageEnhance.Color, self.saturation),
        ]
        image = Image.fromarray(sample["image"])
        for i in rng.permutation(len(steps)):
            enhancer, bounds = steps[i]
            if bounds != (1, 1):
                image = enhancer(image).enhance(rng.uniform(*bounds))
        return {"image": np.asarray(image), "mask": sample["mask"]}


def _rescaled(sample: Sample, scale: float) -> Sample:
    height, width = sample["mask"].shape
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    if size == (width, height):
        return sample
    image = Image.fromarray(sample["image"]).resize(size, Image.Resampling.BILINEAR)
    mask = Image.fromarray(sample["mask"]).resize(size, Image.Resampling.NEAREST)
    return {"image": np.asarray(image), "mask": np.asarray(mask)}


def _size(crop_size: int | Sequence[int]) -> tuple[int, int]:
    sides = (crop_size,) * 2 if isinstance(crop_size, int) else tuple(crop_size)
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ConfigError(
            f"crop_size must be (width, height) in whole pixels, or one number, not {crop_size!r}"
        )
    return sides[0], sides[1]


def _one_of(name: str, value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise ConfigError(f"{name} must be {' or '.join(map(repr, allowed))}, not {value!r}")
    return value


def _factors(name: str, value: float | Sequence[float]) -> tuple[float, float]:
    if isinstance(value, int | float):
        bounds = [max(0.0, 1.0 - value), 1.0 + value]
    else:
        bounds = list(value)
    if len(bounds) != 2 or not 0 <= bounds[0] <= bounds[1]:
        raise ConfigError(f"{name} must be a number of at least 0, or [smallest, largest], not {value!r}")
    return bounds[0], bounds[1]
