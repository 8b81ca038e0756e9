"""Transforms for images without masks, named as in torchvision.

Transforms that move pixels are called with an image, uint8 (3, H, W), and the sample's random generator. They return
the transformed image, which may be the input or a view of it. `ToTensor` and `Normalize` run on the device: a dataset
adds their parameters to the sample as `device_params`, and the data preprocessor applies them to a whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.errors import ConfigError, DataError
from slipstream.registry import TRANSFORMS

__all__ = ["ImageTransform", "Normalize", "RandomCrop", "RandomHorizontalFlip", "ToTensor", "read_transforms"]

ImageTransform: TypeAlias = Callable[[NDArray[np.uint8], np.random.Generator], NDArray[np.uint8]]


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
        sides = (size, size) if isinstance(size, int) else tuple(size)
        if len(sides) != 2 or min(sides) < 1 or padding < 0:
            raise ConfigError(
                "size must be a number of pixels or (height, width), and padding must be at least 0; "
                f"got size={size!r}, padding={padding!r}"
            )
        self.size, self.padding = (sides[0], sides[1]), padding

    def __call__(self, image: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
        """Return the crop."""
        channels, height, width = image.shape
        spare_y, spare_x = (
            side + 2 * self.padding - crop for side, crop in zip((height, width), self.size, strict=True)
        )
        if spare_y < 0 or spare_x < 0:
            raise DataError(
                f"cannot crop {self.size} (height, width) from an image of size {(height, width)} with padding="
                f"{self.padding}; reduce size or increase padding"
            )
        # Position of the crop relative to the top-left corner of the image.
        top, left = (
            int(rng.integers(spare_y + 1)) - self.padding,
            int(rng.integers(spare_x + 1)) - self.padding,
        )
        crop = np.zeros((channels, *self.size), dtype=np.uint8)
        inside = image[:, max(0, top) : top + self.size[0], max(0, left) : left + self.size[1]]
        y, x = max(0, -top), max(0, -left)
        crop[:, y : y + inside.shape[1], x : x + inside.shape[2]] = inside
        return crop


@TRANSFORMS.register_module()
class RandomHorizontalFlip:
    """Mirror an image left to right with probability `p`."""

    def __init__(self, p: float = 0.5) -> None:
        if not 0 <= p <= 1:
            raise ConfigError(f"p must be in the range 0 to 1, got {p}")
        self.p = p

    def __call__(self, image: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
        """Return the image, possibly mirrored."""
        return image[:, :, ::-1] if rng.random() < self.p else image


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
            raise ConfigError(
                f"mean and std must have three numbers each, and std must be greater than 0; "
                f"got mean={mean!r}, std={std!r}"
            )
        self.mean, self.std = tuple(mean), tuple(std)


def read_transforms(
    transforms: Sequence[ImageTransform | ToTensor | Normalize | Mapping[str, Any]],
) -> tuple[list[ImageTransform], torch.Tensor | None]:
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
        raise ConfigError(
            "ToTensor, or ToTensor and Normalize, must be the last transforms; "
            f"got {', '.join(kind.__name__ for kind in kinds)}",
            "transforms",
        )
    if end == len(built):
        return built, None
    mean, std = np.zeros(3), np.ones(3)
    if kinds[-1] is Normalize:
        mean, std = np.array(built[-1].mean), np.array(built[-1].std)
    affine = np.concatenate([1 / (255 * std), -mean / std])
    return built[:end], torch.from_numpy(affine.astype(np.float32))
