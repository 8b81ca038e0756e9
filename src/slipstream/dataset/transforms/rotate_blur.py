"""Rotation and blur of image-mask pairs with Pillow, named as in SuperGradients; see `geometry.py`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.dataset.transforms.crop import Sample
from slipstream.dataset.transforms.geometry import read_fill
from slipstream.errors import ConfigError
from slipstream.extras import extra
from slipstream.registry import TRANSFORMS

__all__ = ["SegRandomGaussianBlur", "SegRandomRotate"]


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
        if not 0 <= prob <= 1:
            raise ConfigError(f"must be between 0 and 1, not {prob}", "prob")
        self.prob = prob

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample, possibly with a blurred image."""
        with extra("images"):
            from PIL import Image, ImageFilter

        if rng.random() >= self.prob:
            return sample
        blurred = Image.fromarray(sample["image"]).filter(ImageFilter.GaussianBlur(rng.random()))
        return {"image": np.asarray(blurred), "mask": sample["mask"]}
