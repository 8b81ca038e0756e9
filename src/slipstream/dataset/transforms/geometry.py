"""Transforms for image-mask pairs, named as in SuperGradients.

A transform is called with a sample, `{"image": uint8 (H, W, 3), "mask": uint8 (H, W)}`, and the sample's random
generator, and returns the transformed sample. Sizes are (width, height), as in SuperGradients recipes. Images are
resampled bilinearly (with Pillow's antialiasing when they shrink), and masks with nearest-neighbor interpolation.

A dataset does not call the transforms one by one. It composes the geometric transforms into one `CropRegion`. Color
jitter and normalization run on the device (see `pipeline.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from slipstream.dataset.transforms.crop import CropRegion, Geometric, Sample
from slipstream.errors import ConfigError, DataError
from slipstream.extras import extra
from slipstream.registry import TRANSFORMS
from slipstream.typecheck import Positive, PositiveInt, Probability, check

Channels: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]


@TRANSFORMS.register_module()
class SegRandomFlip(Geometric):
    """Mirror the image and the mask left to right with probability `prob`."""

    def __init__(self, prob: float = 0.5) -> None:
        self.prob = check(prob, Probability, "prob")

    def update_region(self, region: CropRegion, rng: np.random.Generator) -> CropRegion:
        """Return the region, possibly mirrored."""
        return region.flipped() if rng.random() < self.prob else region


@TRANSFORMS.register_module()
class SegResize(Geometric):
    """Resize the image and the mask to `h` x `w` pixels, without preserving the aspect ratio.

    Raises:
        ConfigError: a side is less than 1.
    """

    def __init__(self, h: int, w: int) -> None:
        self.w, self.h = _size((w, h))

    def update_region(self, region: CropRegion, rng: np.random.Generator) -> CropRegion | None:
        """Return the resized region."""
        return region.resized((self.w, self.h))


@TRANSFORMS.register_module()
class SegRescale(Geometric):
    """Scale the image and the mask by a factor, or so that the shorter or longer side has a given length.

    Exactly one of the three arguments is required. Sides are rounded down to whole pixels, as in SuperGradients. The
    side set by `short_size` or `long_size` has exactly that length.
    """

    def __init__(
        self, scale_factor: float | None = None, short_size: int | None = None, long_size: int | None = None
    ) -> None:
        values = [value for value in (scale_factor, short_size, long_size) if value is not None]
        if len(values) != 1 or values[0] <= 0:
            raise ConfigError("requires one of scale_factor, short_size and long_size", "SegRescale")
        self.scale_factor, self.short_size, self.long_size = scale_factor, short_size, long_size

    def update_region(self, region: CropRegion, rng: np.random.Generator) -> CropRegion | None:
        """Return the scaled region."""
        if self.scale_factor is not None:
            return _rescaled(region, self.scale_factor)
        if self.short_size is not None:
            return _fitted(region, self.short_size, min(region.canvas))
        return _fitted(region, self.long_size or 0, max(region.canvas))


@TRANSFORMS.register_module()
class SegRandomRescale(Geometric):
    """Scale the image and the mask by a factor drawn uniformly from `scales`.

    Sides are rounded down to whole pixels, as in SuperGradients.

    Args:
        scales: the smallest and the largest factor; a single number s means the range between s and 1.
    """

    def __init__(self, scales: float | Sequence[float] = (0.5, 2.0)) -> None:
        bounds = sorted([scales, 1.0] if isinstance(scales, int | float) else scales)
        if len(bounds) != 2 or bounds[0] <= 0:
            raise ConfigError(f"scales must be one or two numbers greater than 0, got {scales!r}")
        self.scales = (bounds[0], bounds[1])

    def update_region(self, region: CropRegion, rng: np.random.Generator) -> CropRegion | None:
        """Return the region, scaled by a random factor."""
        return _rescaled(region, rng.uniform(*self.scales)) if region.covers_source else None


@TRANSFORMS.register_module()
class SegPadShortToCropSize(Geometric):
    """Pad the image and the mask along each dimension that is smaller than the crop.

    Args:
        crop_size: (width, height), or one number for both.
        fill_mask: class id of the padding, usually the dataset's `ignore_index`. There is no default, because 0,
            the SuperGradients default, is a class in many datasets (road in Cityscapes), and the network would
            silently learn to predict that class for the padding.
        fill_image: color of the padding, a gray value or [r, g, b].
        padding_mode: 'center' pads both sides equally, as in SuperGradients (an extra pixel goes to the top or left);
            'random' places the image at a random position.
    """

    def __init__(
        self,
        crop_size: int | Sequence[int],
        fill_mask: int,
        fill_image: int | Sequence[int] = 0,
        padding_mode: Literal["center", "random"] = "center",
    ) -> None:
        self.crop_size = _size(crop_size)
        self.fill = read_fill(fill_mask, fill_image)
        self.padding_mode = check(padding_mode, Literal["center", "random"], "padding_mode")

    def update_region(self, region: CropRegion, rng: np.random.Generator) -> CropRegion | None:
        """Return the region, padded to at least the crop size."""
        width, height = region.canvas
        right, down = max(0, self.crop_size[0] - width), max(0, self.crop_size[1] - height)
        if not down and not right:
            return region
        if region.fill not in (None, self.fill):
            return None
        if self.padding_mode == "random":
            top, left = int(rng.integers(down + 1)), int(rng.integers(right + 1))
        else:
            top, left = (down + 1) // 2, (right + 1) // 2
        return region.padded(left, top, (width + right, height + down), self.fill)


@TRANSFORMS.register_module()
class SegPadToDivisible(Geometric):
    """Pad the image and the mask on the right and at the bottom, so that both sides are multiples of `divisible_value`.

    Args:
        divisible_value: the divisor, at least 1.
        fill_mask: class id of the padding, usually the dataset's `ignore_index`. The default is 0, as in
            SuperGradients.
        fill_image: color of the padding, a gray value or [r, g, b].

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(self, divisible_value: int, fill_mask: int = 0, fill_image: int | Sequence[int] = 0) -> None:
        self.divisible_value = check(divisible_value, PositiveInt, "divisible_value")
        self.fill = read_fill(fill_mask, fill_image)

    def update_region(self, region: CropRegion, rng: np.random.Generator) -> CropRegion | None:
        """Return the padded region."""
        width, height = (side + -side % self.divisible_value for side in region.canvas)
        if (width, height) == region.canvas:
            return region
        return region.padded(0, 0, (width, height), self.fill)


@TRANSFORMS.register_module()
class SegCropImageAndMask(Geometric):
    """Crop the image and the mask at the same position.

    Args:
        crop_size: (width, height), or one number for both.
        mode: 'random' draws the position uniformly; 'center' crops the center. If m rows or columns are removed,
            round(m / 2) of them are above or to the left of the crop, as in SuperGradients.

    Raises:
        DataError: the image is smaller than the crop (raised when the transform is called).
    """

    def __init__(self, crop_size: int | Sequence[int], mode: Literal["random", "center"] = "random") -> None:
        self.crop_size = _size(crop_size)
        self.mode = check(mode, Literal["random", "center"], "mode")

    def update_region(self, region: CropRegion, rng: np.random.Generator) -> CropRegion:
        """Return the cropped region."""
        width, height = region.canvas
        spare_y, spare_x = height - self.crop_size[1], width - self.crop_size[0]
        if spare_y < 0 or spare_x < 0:
            raise DataError(
                f"cannot crop {self.crop_size} (width, height) from {region.canvas}; use SegPadShortToCropSize"
            )
        if self.mode == "random":
            top, left = int(rng.integers(spare_y + 1)), int(rng.integers(spare_x + 1))
        else:
            top, left = round(spare_y / 2), round(spare_x / 2)
        return region.cropped(left, top, self.crop_size)


@TRANSFORMS.register_module()
class SegColorJitter:
    """Change the brightness, contrast and saturation of the image in random order, like torchvision's `ColorJitter`.

    Let f be a factor, gray the gray value of each pixel (ITU-R 601), and g the mean of the gray values. A brightness
    change returns `f * image`, a contrast change returns `f * image + (1 - f) * g`, and a saturation change returns
    `f * image + (1 - f) * gray`. Results are clamped to 0..255. On the CPU, Pillow also rounds g and the gray values to
    integers, and rounds results down.

    Args:
        brightness, contrast, saturation: range of f as [smallest, largest]; a single number v means
            `[max(0, 1 - v), 1 + v]`, and 0 disables the change.
        hue: must be 0.

    Raises:
        ConfigError: a range is invalid, or `hue` is not 0.
    """

    def __init__(
        self,
        brightness: float | Sequence[float] = 0.0,
        contrast: float | Sequence[float] = 0.0,
        saturation: float | Sequence[float] = 0.0,
        hue: float | Sequence[float] = 0.0,
    ) -> None:
        if hue not in (0, (0, 0), [0, 0]):
            raise ConfigError("is not supported; remove it, or add your own transform", "hue")
        self.brightness = _factors("brightness", brightness)
        self.contrast = _factors("contrast", contrast)
        self.saturation = _factors("saturation", saturation)

    def draw(self, rng: np.random.Generator) -> list[tuple[int, float]]:
        """Return (kind, factor) pairs in random order; kinds are 0 (brightness), 1 (contrast) and 2 (saturation)."""
        bounds = (self.brightness, self.contrast, self.saturation)
        order = [i for i in rng.permutation(len(bounds)).tolist() if bounds[i] != (1, 1)]
        return [(i, rng.uniform(*bounds[i])) for i in order]

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample with a color-jittered image and an unchanged mask."""
        with extra("images"):
            from PIL import Image, ImageEnhance

        enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
        image = Image.fromarray(sample["image"])
        for i, factor in self.draw(rng):
            image = enhancers[i](image).enhance(factor)
        return {"image": np.asarray(image), "mask": sample["mask"]}


@TRANSFORMS.register_module()
class SegRandomRotate:
    """Rotate the image and the mask counterclockwise around their center by a uniformly random angle.

    The image size does not change. The image is resampled bilinearly, and the mask with nearest-neighbor interpolation.

    Args:
        min_deg, max_deg: range of the angle in degrees.
        fill_mask: class id of the pixels outside the image, usually the dataset's `ignore_index`.
        fill_image: color of these pixels, a gray value or [r, g, b].

    Raises:
        ConfigError: the range is empty, or a fill value is not between 0 and 255.
    """

    def __init__(
        self,
        min_deg: float = -10,
        max_deg: float = 10,
        fill_mask: int = 0,
        fill_image: int | Sequence[int] = 0,
    ) -> None:
        if min_deg > max_deg:
            raise ConfigError(f"must be at most max_deg ({max_deg}), not {min_deg}", "min_deg")
        self.min_deg, self.max_deg = min_deg, max_deg
        *self.fill_image, self.fill_mask = read_fill(fill_mask, fill_image)

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the rotated sample."""
        with extra("images"):
            from PIL import Image

        angle = rng.uniform(self.min_deg, self.max_deg)
        image, mask = (Image.fromarray(sample[key]) for key in ("image", "mask"))
        bilinear, nearest = Image.Resampling.BILINEAR, Image.Resampling.NEAREST
        return {
            "image": np.asarray(image.rotate(angle, bilinear, fillcolor=tuple(self.fill_image))),
            "mask": np.asarray(mask.rotate(angle, nearest, fillcolor=self.fill_mask)),
        }


@TRANSFORMS.register_module()
class SegRandomGaussianBlur:
    """Blur the image with probability `prob`, with a radius drawn uniformly between 0 and 1.

    Raises:
        ConfigError: `prob` is not between 0 and 1.
    """

    def __init__(self, prob: float = 0.5) -> None:
        self.prob = check(prob, Probability, "prob")

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample, possibly with a blurred image."""
        with extra("images"):
            from PIL import Image, ImageFilter

        if rng.random() >= self.prob:
            return sample
        blurred = Image.fromarray(sample["image"]).filter(ImageFilter.GaussianBlur(rng.random()))
        return {"image": np.asarray(blurred), "mask": sample["mask"]}


class Affine(ABC):
    """Base class for transforms of the form `image * scale + shift`, which come last in a dataset's transforms."""

    @abstractmethod
    def compose(self, scale: Channels, shift: Channels) -> tuple[Channels, Channels]:
        """Return the scale and shift, float64 (3,), of the given affine transform followed by this transform."""

    def __call__(self, sample: Sample, rng: np.random.Generator) -> dict[str, np.ndarray[Any, Any]]:
        """Return the sample with a float32 image."""
        scale, shift = self.compose(np.ones(3), np.zeros(3))
        return {"image": (sample["image"] * scale + shift).astype(np.float32), "mask": sample["mask"]}


@TRANSFORMS.register_module()
class SegStandardize(Affine):
    """Divide the image by `max_value`."""

    def __init__(self, max_value: float = 255) -> None:
        self.max_value = check(max_value, Positive, "max_value")

    def compose(self, scale: Channels, shift: Channels) -> tuple[Channels, Channels]:
        """Return the scale and shift, divided by `max_value`."""
        return scale / self.max_value, shift / self.max_value


@TRANSFORMS.register_module()
class SegNormalize(Affine):
    """Subtract `mean` and divide by `std`, one number per channel.

    The input range is 0 to 1 after SegStandardize, and 0 to 255 otherwise.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        if len(mean) != 3 or len(std) != 3 or not all(value > 0 for value in std):
            raise ConfigError(f"mean and std must have three numbers, with std > 0: {mean!r}, {std!r}")
        self.mean, self.std = np.array(mean, float), np.array(std, float)

    def compose(self, scale: Channels, shift: Channels) -> tuple[Channels, Channels]:
        """Return the scale and shift after normalization."""
        return scale / self.std, (shift - self.mean) / self.std


@TRANSFORMS.register_module()
class SegConvertToTensor:
    """No-op for compatibility with SuperGradients recipes; datasets always return tensors.

    Args:
        mask_output_dtype: must be None or int64 (or `long`), because the loss always receives int64 masks.
        add_mask_dummy_dim: must be False, because losses and metrics require masks of shape (H, W).
    """

    def __init__(self, mask_output_dtype: Any = None, add_mask_dummy_dim: bool = False) -> None:
        supported = str(mask_output_dtype).removeprefix("torch.") in ("None", "int64", "long")
        if add_mask_dummy_dim or not supported:
            raise ConfigError("masks are always int64 (H, W); remove the options", "SegConvertToTensor")
        self.mask_output_dtype = mask_output_dtype

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample."""
        return sample


def read_fill(fill_mask: int, fill_image: int | Sequence[int]) -> tuple[int, int, int, int]:
    """Return the red, green and blue values and the class id for pixels outside the image.

    Raises:
        ConfigError: a value is not between 0 and 255.
    """
    colors = (fill_image,) * 3 if isinstance(fill_image, int) else tuple(fill_image)
    if len(colors) != 3 or not all(0 <= value <= 255 for value in (fill_mask, *colors)):
        raise ConfigError(f"fill values must be from 0 to 255, not {fill_mask!r} and {fill_image!r}")
    return colors[0], colors[1], colors[2], fill_mask


def _rescaled(region: CropRegion, scale: float) -> CropRegion | None:
    width, height = region.canvas
    return region.resized((max(1, int(width * scale)), max(1, int(height * scale))))


def _fitted(region: CropRegion, length: int, side: int) -> CropRegion | None:
    """Return the region, scaled so that `side` becomes `length`.

    The quotient `length / side` is not computed, because `int(length / side * side)` can be `length - 1`.
    """
    width, height = (max(1, int(value * length // side)) for value in region.canvas)
    return region.resized((width, height))


def _size(crop_size: int | Sequence[int]) -> tuple[int, int]:
    sides = (crop_size,) * 2 if isinstance(crop_size, int) else tuple(crop_size)
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ConfigError(f"crop_size must be (width, height) in pixels, or one number, got {crop_size!r}")
    return sides[0], sides[1]


def _factors(name: str, value: float | Sequence[float]) -> tuple[float, float]:
    bounds = [max(0.0, 1.0 - value), 1.0 + value] if isinstance(value, int | float) else list(value)
    if len(bounds) != 2 or not 0 <= bounds[0] <= bounds[1]:
        raise ConfigError(f"{name} must be a non-negative number or [smallest, largest], got {value!r}")
    return bounds[0], bounds[1]
