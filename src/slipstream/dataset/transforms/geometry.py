"""Augmentations of images with masks, under SuperGradients' names.

Each is called with a sample, `{"image": uint8 (H, W, 3), "mask": uint8 (H, W)}`, and the sample's generator,
and returns a new sample. Sizes are (width, height), as in SuperGradients' recipes. Images are resampled
bilinearly (with Pillow's antialiasing when they shrink), masks by nearest neighbour.

A data set does not call them one by one: it composes those that move pixels into one `Window`, and leaves colours and
normalisation to the device (`pipeline.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from slipstream.dataset.transforms.crop import Geometric, Sample, Window
from slipstream.errors import ConfigError, DataError
from slipstream.extras import extra
from slipstream.registry import TRANSFORMS

__all__ = [
    "Affine",
    "SegColorJitter",
    "SegConvertToTensor",
    "SegCropImageAndMask",
    "SegNormalize",
    "SegPadShortToCropSize",
    "SegRandomFlip",
    "SegRandomRescale",
    "SegRescale",
    "SegStandardize",
]

Channels: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]


@TRANSFORMS.register_module()
class SegRandomFlip(Geometric):
    """Mirror image and mask left to right with probability `prob`."""

    def __init__(self, prob: float = 0.5) -> None:
        if not 0 <= prob <= 1:
            raise ConfigError(f"prob must be 0 to 1, not {prob}")
        self.prob = prob

    def place(self, window: Window, rng: np.random.Generator) -> Window:
        """Return the window as it is, or mirrored."""
        return window.flipped() if rng.random() < self.prob else window


@TRANSFORMS.register_module()
class SegRescale(Geometric):
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

    def place(self, window: Window, rng: np.random.Generator) -> Window | None:
        """Return the window, scaled."""
        if self.scale_factor is not None:
            return _rescaled(window, self.scale_factor)
        if self.short_size is not None:
            return _rescaled(window, self.short_size / min(window.canvas))
        return _rescaled(window, (self.long_size or 0) / max(window.canvas))


@TRANSFORMS.register_module()
class SegRandomRescale(Geometric):
    """Scale image and mask by a factor drawn uniformly from `scales`.

    Args:
        scales: the smallest and the largest factor; a single number s stands for the range between s and 1.
    """

    def __init__(self, scales: float | Sequence[float] = (0.5, 2.0)) -> None:
        bounds = sorted([scales, 1.0] if isinstance(scales, int | float) else scales)
        if len(bounds) != 2 or bounds[0] <= 0:
            raise ConfigError(f"scales must be one or two numbers greater than 0, not {scales!r}")
        self.scales = (bounds[0], bounds[1])

    def place(self, window: Window, rng: np.random.Generator) -> Window | None:
        """Return the window, scaled at random."""
        return _rescaled(window, rng.uniform(*self.scales)) if window.untouched else None


@TRANSFORMS.register_module()
class SegPadShortToCropSize(Geometric):
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

    def place(self, window: Window, rng: np.random.Generator) -> Window | None:
        """Return the window, at least as large as the crop."""
        width, height = window.canvas
        right, down = max(0, self.crop_size[0] - width), max(0, self.crop_size[1] - height)
        red, green, blue = self.fill_image
        fill = (red, green, blue, self.fill_mask)
        if not down and not right:
            return window
        if window.fill not in (None, fill):
            return None
        if self.padding_mode == "random":
            top, left = int(rng.integers(down + 1)), int(rng.integers(right + 1))
        else:
            top, left = (down + 1) // 2, (right + 1) // 2
        return window.padded(left, top, (width + right, height + down), fill)


@TRANSFORMS.register_module()
class SegCropImageAndMask(Geometric):
    """Cut the same rectangle out of image and mask.

    Args:
        crop_size: (width, height), or one number for both.
        mode: 'random' draws every possible place with the same probability; 'center' takes the middle.

    Raises:
        DataError: the image is smaller than the crop.
    """

    def __init__(self, crop_size: int | Sequence[int], mode: Literal["random", "center"] = "random") -> None:
        self.crop_size = _size(crop_size)
        self.mode = _one_of("mode", mode, ("random", "center"))

    def place(self, window: Window, rng: np.random.Generator) -> Window:
        """Return the window's cut."""
        width, height = window.canvas
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
        return window.cropped(left, top, self.crop_size)


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

    def draw(self, rng: np.random.Generator) -> list[tuple[int, float]]:
        """Return the changes in their order: 0 brightness, 1 contrast, 2 saturation, and the factor."""
        bounds = (self.brightness, self.contrast, self.saturation)
        order = [i for i in rng.permutation(len(bounds)).tolist() if bounds[i] != (1, 1)]
        return [(i, rng.uniform(*bounds[i])) for i in order]

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample with other colours and the same mask."""
        with extra("images"):
            from PIL import Image, ImageEnhance

        enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
        image = Image.fromarray(sample["image"])
        for i, factor in self.draw(rng):
            image = enhancers[i](image).enhance(factor)
        return {"image": np.asarray(image), "mask": sample["mask"]}


class Affine(ABC):
    """A transform of values: in the end of a data set's list, after which an image is `image * scale + shift`."""

    @abstractmethod
    def after(self, scale: Channels, shift: Channels) -> tuple[Channels, Channels]:
        """Return scale and shift, float64 (3,), of what comes before and this."""

    def __call__(self, sample: Sample, rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
        """Return the sample with a float32 image."""
        scale, shift = self.after(np.ones(3), np.zeros(3))
        return {"image": (sample["image"] * scale + shift).astype(np.float32), "mask": sample["mask"]}


@TRANSFORMS.register_module()
class SegStandardize(Affine):
    """Divide the image by `max_value`."""

    def __init__(self, max_value: float = 255) -> None:
        if not max_value > 0:
            raise ConfigError(f"must be greater than 0, not {max_value!r}", "max_value")
        self.max_value = max_value

    def after(self, scale: Channels, shift: Channels) -> tuple[Channels, Channels]:
        """Return both, divided."""
        return scale / self.max_value, shift / self.max_value


@TRANSFORMS.register_module()
class SegNormalize(Affine):
    """Subtract `mean` and divide by `std`, one number a channel, on the scale that the image has by then.

    That is 0 to 1 after SegStandardize, else 0 to 255.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        if len(mean) != 3 or len(std) != 3 or not all(value > 0 for value in std):
            raise ConfigError(
                "mean and std must be three numbers each, for red, green and blue, those of std greater than 0; "
                f"got mean={mean!r}, std={std!r}"
            )
        self.mean, self.std = np.array(mean, float), np.array(std, float)

    def after(self, scale: Channels, shift: Channels) -> tuple[Channels, Channels]:
        """Return both, normalised."""
        return scale / self.std, (shift - self.mean) / self.std


@TRANSFORMS.register_module()
class SegConvertToTensor:
    """The end of SuperGradients' lists. A data set makes tensors anyhow, so it changes nothing.

    Args:
        mask_output_dtype: int64 (or `long`), as the loss gets the masks in any case.
        add_mask_dummy_dim: must be False: losses and metrics want masks (H, W).
    """

    def __init__(self, mask_output_dtype: Any = None, add_mask_dummy_dim: bool = False) -> None:
        if str(mask_output_dtype).removeprefix("torch.") not in ("None", "int64", "long"):
            raise ConfigError(
                f"masks travel as uint8 and reach the loss as int64, not as {mask_output_dtype}: leave it out",
                "mask_output_dtype",
            )
        if add_mask_dummy_dim:
            raise ConfigError("losses and metrics want masks (H, W): leave it out", "add_mask_dummy_dim")

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample."""
        return sample


def _rescaled(window: Window, scale: float) -> Window | None:
    width, height = window.canvas
    return window.resized((max(1, round(width * scale)), max(1, round(height * scale))))


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
