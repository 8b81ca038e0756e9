"""Augmentations of images without masks, under torchvision's names.

Those that move pixels are called with an image, uint8 (3, H, W), and the sample's generator, and return a new image.
`ToTensor` and `Normalize` are not computed here: a data set sends them along as the sample's `finish`, and they are
done in one go for a whole batch on the device.
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
    """Pad an image with black and cut a rectangle out of it, each place with the same probability.

    Args:
        size: (height, width) of the rectangle, or one number for both.
        padding: pixels at each side.

    Raises:
        DataError: when called with an image that is smaller than the rectangle, padding included.
    """

    def __init__(self, size: int | Sequence[int], padding: int = 0) -> None:
        sides = (size, size) if isinstance(size, int) else tuple(size)
        if len(sides) != 2 or min(sides) < 1 or padding < 0:
            raise ConfigError(
                "size must be a number of pixels or (height, width), and padding a number of at least 0; "
                f"got size={size!r}, padding={padding!r}"
            )
        self.size, self.padding = (sides[0], sides[1]), padding

    def __call__(self, image: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
        """Return the cut."""
        channels, height, width = image.shape
        spare_y, spare_x = (
            side + 2 * self.padding - cut for side, cut in zip((height, width), self.size, strict=True)
        )
        if spare_y < 0 or spare_x < 0:
            raise DataError(
                f"cannot crop {self.size} (height, width) out of an image of {(height, width)} with a padding "
                f"of {self.padding}"
            )
        # Where the cut begins, seen from the image's corner.
        top, left = (
            int(rng.integers(spare_y + 1)) - self.padding,
            int(rng.integers(spare_x + 1)) - self.padding,
        )
        cut = np.zeros((channels, *self.size), dtype=np.uint8)
        inside = image[:, max(0, top) : top + self.size[0], max(0, left) : left + self.size[1]]
        y, x = max(0, -top), max(0, -left)
        cut[:, y : y + inside.shape[1], x : x + inside.shape[2]] = inside
        return cut


@TRANSFORMS.register_module()
class RandomHorizontalFlip:
    """Mirror an image left to right with probability `p`."""

    def __init__(self, p: float = 0.5) -> None:
        if not 0 <= p <= 1:
            raise ConfigError(f"p must be 0 to 1, not {p}")
        self.p = p

    def __call__(self, image: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
        """Return the image as it is, or mirrored."""
        return image[:, :, ::-1] if rng.random() < self.p else image


@TRANSFORMS.register_module()
class ToTensor:
    """Bring pixels from 0..255 to 0..1, on the device."""


@TRANSFORMS.register_module()
class Normalize:
    """Subtract `mean` and divide by `std`, one number a channel, on the device; `ToTensor` comes before."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
            raise ConfigError(
                f"mean and std must be three numbers each, and std greater than 0; got mean={mean!r}, std={std!r}"
            )
        self.mean, self.std = tuple(mean), tuple(std)


def read_transforms(
    transforms: Sequence[ImageTransform | ToTensor | Normalize | Mapping[str, Any]],
) -> tuple[list[ImageTransform], torch.Tensor | None]:
    """Return what is to be done to pixels, in order, and the program of what is to be done on the device.

    The program is float32 (6,), as `slipstream.dataset.transforms.device_transforms` defines it, or None if there is
    nothing.

    Raises:
        ConfigError: `Normalize` without `ToTensor` before it, or something that moves pixels after them.
    """
    built: list[Any] = [TRANSFORMS.build(t) if isinstance(t, Mapping) else t for t in transforms]
    kinds = [type(t) for t in built]
    moves = next((i for i, kind in enumerate(kinds) if kind in (ToTensor, Normalize)), len(built))
    if kinds[moves:] not in ([], [ToTensor], [ToTensor, Normalize]):
        raise ConfigError(
            "transforms must end in ToTensor, or ToTensor and Normalize, after everything that works on pixels; "
            f"got {', '.join(kind.__name__ for kind in kinds)}",
            "transforms",
        )
    if moves == len(built):
        return built, None
    mean, std = np.zeros(3), np.ones(3)
    if kinds[-1] is Normalize:
        mean, std = np.array(built[-1].mean), np.array(built[-1].std)
    affine = np.concatenate([1 / (255 * std), -mean / std])
    return built[:moves], torch.from_numpy(affine.astype(np.float32))
