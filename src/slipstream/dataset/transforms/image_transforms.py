"""Transforms for images without masks, named as in torchvision.

Transforms that move pixels are called with an image, uint8 (3, H, W), and the sample's random generator. They return
the transformed image, which may be the input or a view of it. `ToTensor` and `Normalize` run on the device: a dataset
adds their parameters to the sample as `device_params`, and the data preprocessor applies them to a whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.errors import ConfigError, DataError
from slipstream.extras import extra
from slipstream.registry import TRANSFORMS
from slipstream.typecheck import NonNegativeInt, Probability, check

_Filter = Literal["bilinear", "bicubic", "lanczos", "hamming", "nearest", "box"]
_RANDOM_FILTERS = ("bilinear", "bicubic")
# Maximum number of random boxes to try. If none fits in the image, a centered box is used.
_MAX_ATTEMPTS = 10

Image: TypeAlias = NDArray[np.uint8]
ImageTransform: TypeAlias = Callable[[Image, np.random.Generator], Image]


@TRANSFORMS.register_module()
class RandomCrop:
    """Pad an image with zeros and crop it at a uniformly random position.

    Args:
        size: (height, width) of the crop, or one number for both.
        padding: number of zero pixels to add on each side.

    Raises:
        DataError: the padded image is smaller than the crop (raised when the transform is called).
    """

    def __init__(self, size: int | Sequence[int], padding: int = 0) -> None:
        self.size, self.padding = _pair("size", size), check(padding, NonNegativeInt, "padding")

    def __call__(self, image: Image, rng: np.random.Generator) -> Image:
        """Return the crop."""
        (channels, height, width), (rows, columns), pad = image.shape, self.size, self.padding
        padded = np.zeros((channels, height + 2 * pad, width + 2 * pad), np.uint8)  # faster than `np.pad`
        padded[:, pad : pad + height, pad : pad + width] = image
        spare_y, spare_x = padded.shape[1] - rows, padded.shape[2] - columns
        if spare_y < 0 or spare_x < 0:
            raise DataError(f"cannot crop {self.size} (height, width) from {image.shape[1:]}; reduce size")
        top, left = int(rng.integers(spare_y + 1)), int(rng.integers(spare_x + 1))
        return padded[:, top : top + rows, left : left + columns]


@TRANSFORMS.register_module()
class RandomHorizontalFlip:
    """Mirror an image left to right with probability `p`."""

    def __init__(self, p: float = 0.5) -> None:
        self.p = check(p, Probability, "p")

    def __call__(self, image: Image, rng: np.random.Generator) -> Image:
        """Return the image, possibly mirrored."""
        return image[:, :, ::-1] if rng.random() < self.p else image


@TRANSFORMS.register_module()
class Resize:
    """Resize an image with antialiasing.

    Args:
        size: (height, width), or one number for the shorter side; the longer side is then scaled by the same factor
            and rounded down.
        interpolation: 'bilinear', 'bicubic', 'lanczos', 'hamming', 'nearest' or 'box'.
    """

    def __init__(self, size: int | Sequence[int], interpolation: str = "bilinear") -> None:
        self.size = size if isinstance(size, int) else _pair("size", size)
        self.interpolation = _filter(interpolation)

    def __call__(self, image: Image, rng: np.random.Generator) -> Image:
        """Return the resized image, uint8 (3, H, W)."""
        height, width = image.shape[1:]
        if not isinstance(self.size, int):
            return _resized(image, self.size, self.interpolation)
        longer = int(self.size * max(height, width) / min(height, width))
        size = (self.size, longer) if height <= width else (longer, self.size)
        return _resized(image, size, self.interpolation)


@TRANSFORMS.register_module()
class CenterCrop:
    """Crop the center of an image. Smaller images are padded with zeros first.

    If m rows or columns are removed, round(m / 2) of them are above or to the left of the crop, as in torchvision.

    Args:
        size: (height, width), or one number for both.
    """

    def __init__(self, size: int | Sequence[int]) -> None:
        self.size = _pair("size", size)

    def __call__(self, image: Image, rng: np.random.Generator) -> Image:
        """Return the crop, uint8 (3, H, W)."""
        missing = [max(0, side - length) for side, length in zip(self.size, image.shape[1:], strict=True)]
        if any(missing):
            pads = [(0, 0), *((spare // 2, spare - spare // 2) for spare in missing)]
            image = np.pad(image, pads)
        (height, width), (rows, columns) = image.shape[1:], self.size
        top, left = round((height - rows) / 2), round((width - columns) / 2)
        return image[:, top : top + rows, left : left + columns]


@TRANSFORMS.register_module()
class RandomResizedCropAndInterpolation:
    """Crop a random box and resize it to a fixed size.

    The area of the box is a uniformly random fraction of the image's area, and the logarithm of its aspect ratio is
    uniformly random. If none of ten random boxes fits in the image, the largest centered box with an allowed aspect
    ratio is used.

    Args:
        size: (height, width) of the result, or one number for both.
        scale: smallest and largest fraction of the area.
        ratio: smallest and largest aspect ratio, width / height.
        interpolation: as for `Resize`; 'default' is bilinear, and 'random' draws bilinear or bicubic for each image.
    """

    def __init__(
        self,
        size: int | Sequence[int],
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        interpolation: str = "default",
    ) -> None:
        self.size = _pair("size", size)
        for name, bounds in (("scale", scale), ("ratio", ratio)):
            if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1]:
                raise ConfigError(f"must be [smallest, largest], with positive values, not {bounds!r}", name)
        self.scale, self.ratio = (scale[0], scale[1]), (ratio[0], ratio[1])
        self.filters = _RANDOM_FILTERS if interpolation == "random" else (_filter(interpolation),)

    def box(self, height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
        """Return a random box (left, top, right, bottom) in an image of this size."""
        for _ in range(_MAX_ATTEMPTS):
            area = height * width * rng.uniform(*self.scale)
            ratio = math.exp(rng.uniform(math.log(self.ratio[0]), math.log(self.ratio[1])))
            columns, rows = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < columns <= width and 0 < rows <= height:
                top, left = int(rng.integers(height - rows + 1)), int(rng.integers(width - columns + 1))
                return left, top, left + columns, top + rows
        ratio = min(max(width / height, self.ratio[0]), self.ratio[1])
        columns, rows = min(width, round(height * ratio)), min(height, round(width / ratio))
        left, top = (width - columns) // 2, (height - rows) // 2
        return left, top, left + columns, top + rows

    def __call__(self, image: Image, rng: np.random.Generator) -> Image:
        """Return the crop, uint8 (3, H, W)."""
        left, top, right, bottom = self.box(image.shape[1], image.shape[2], rng)
        chosen = self.filters[int(rng.integers(len(self.filters)))]
        return _resized(image[:, top:bottom, left:right], self.size, chosen)


def _resized(image: Image, size: tuple[int, int], interpolation: str) -> Image:
    if image.shape[1:] == size:
        return image
    with extra("images"):
        from PIL import Image as Pillow

    chosen = Pillow.Resampling[interpolation.upper()]
    resized = Pillow.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))).resize(size[::-1], chosen)
    return np.asarray(resized).transpose(2, 0, 1)


def _filter(name: Any) -> str:
    return check("bilinear" if name == "default" else name, _Filter, "interpolation")


def _pair(name: str, size: int | Sequence[int]) -> tuple[int, int]:
    sides = (size, size) if isinstance(size, int) else tuple(size)
    if len(sides) == 1:
        sides = sides * 2
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ConfigError(f"must be a number of pixels or (height, width), not {size!r}", name)
    return sides[0], sides[1]


@TRANSFORMS.register_module()
class ToTensor:
    """Scale pixels from the range 0..255 to 0..1, on the device."""


@TRANSFORMS.register_module()
class Normalize:
    """Subtract `mean` and divide by `std`, one number per channel, on the device.

    This transform must follow `ToTensor`.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
            raise ConfigError(f"mean and std must have three numbers, with std > 0: {mean!r}, {std!r}")
        self.mean, self.std = tuple(mean), tuple(std)


ImageTransforms: TypeAlias = Sequence[ImageTransform | ToTensor | Normalize | Mapping[str, Any]]


def read_transforms(transforms: ImageTransforms) -> tuple[list[ImageTransform], torch.Tensor | None]:
    """Return the transforms that move pixels, in order, and the parameters of the device transforms.

    The parameters are float32 (6,), as defined in `slipstream.dataset.transforms.device_transforms`, or None if there
    are no device transforms.

    Raises:
        ConfigError: `Normalize` does not follow `ToTensor`, or a transform that moves pixels follows one of them.
    """
    built: list[Any] = [TRANSFORMS.build(t) if isinstance(t, Mapping) else t for t in transforms]
    kinds = [type(t) for t in built]
    end = next((i for i, kind in enumerate(kinds) if kind in (ToTensor, Normalize)), len(built))
    if kinds[end:] not in ([], [ToTensor], [ToTensor, Normalize]):
        names = ", ".join(kind.__name__ for kind in kinds)
        raise ConfigError(f"ToTensor, or ToTensor and Normalize, must be the last, not {names}", "transforms")
    if end == len(built):
        return built, None
    mean, std = np.zeros(3), np.ones(3)
    if kinds[-1] is Normalize:
        mean, std = np.array(built[-1].mean), np.array(built[-1].std)
    affine = np.concatenate([1 / (255 * std), -mean / std])
    return built[:end], torch.from_numpy(affine.astype(np.float32))
