"""SuperGradients' transforms, which can also be called with a single argument, as in a user's own dataset."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from slipstream import dataset
from slipstream.extras import extra
from slipstream.training.factories import default_fill_mask

__all__ = [
    "SegColorJitter",
    "SegConvertToTensor",
    "SegCropImageAndMask",
    "SegNormalize",
    "SegPadShortToCropSize",
    "SegPadToDivisible",
    "SegRandomFlip",
    "SegRandomGaussianBlur",
    "SegRandomRescale",
    "SegRandomRotate",
    "SegRescale",
    "SegResize",
    "SegStandardize",
]


class _Callable:
    """Mixin for a transform that is called as `transform(sample)`; its random numbers depend on Python's `random`."""

    def __call__(self, sample: Mapping[str, Any], rng: np.random.Generator | None = None) -> dict[str, Any]:
        """Return the transformed sample.

        Args:
            sample: a dict with `image` and `mask`, Pillow images or arrays. Pillow images are returned as Pillow
                images, unless the result does not consist of uint8 values.
            rng: the generator that Slipstream's datasets pass, with a sample of arrays.
        """
        if rng is not None:
            return dict(super().__call__(sample, rng))  # type: ignore[misc]
        with extra("images"):
            from PIL import Image

        arrays = {key: np.asarray(sample[key]) for key in ("image", "mask")}
        rng = np.random.default_rng(random.getrandbits(64))
        changed: dict[str, Any] = dict(super().__call__(arrays, rng))  # type: ignore[misc]
        for key, value in changed.items():
            if isinstance(sample[key], Image.Image) and getattr(value, "dtype", None) == np.uint8:
                changed[key] = Image.fromarray(value)
        return {**sample, **changed}


class SegColorJitter(_Callable, dataset.SegColorJitter):
    """See `slipstream.dataset.SegColorJitter`."""


class SegConvertToTensor(_Callable, dataset.SegConvertToTensor):
    """Convert the image to a float32 tensor (C, H, W), and the mask to a tensor (H, W).

    In the list of transforms of Slipstream's datasets, this transform has no effect, because they return tensors.
    """

    def __call__(self, sample: Mapping[str, Any], rng: np.random.Generator | None = None) -> dict[str, Any]:
        """Return a sample of tensors; with `rng`, return the sample unchanged."""
        if rng is not None:
            return dict(sample)
        image, mask = (torch.from_numpy(np.array(sample[key])) for key in ("image", "mask"))
        is_int64 = self.mask_output_dtype is not None
        return {**sample, "image": image.permute(2, 0, 1).float(), "mask": mask.long() if is_int64 else mask}


class SegCropImageAndMask(_Callable, dataset.SegCropImageAndMask):
    """See `slipstream.dataset.SegCropImageAndMask`."""


class SegNormalize(_Callable, dataset.SegNormalize):
    """See `slipstream.dataset.SegNormalize`."""


class SegPadShortToCropSize(_Callable, dataset.SegPadShortToCropSize):
    """See `slipstream.dataset.SegPadShortToCropSize`; `fill_mask` is 0 by default, and a warning is logged."""

    def __init__(
        self,
        crop_size: int | Sequence[int],
        fill_mask: int | None = None,
        fill_image: int | Sequence[int] = 0,
        **options: Any,
    ) -> None:
        fill_mask = default_fill_mask() if fill_mask is None else fill_mask
        super().__init__(crop_size, fill_mask, fill_image, **options)


class SegPadToDivisible(_Callable, dataset.SegPadToDivisible):
    """See `slipstream.dataset.SegPadToDivisible`."""


class SegRandomFlip(_Callable, dataset.SegRandomFlip):
    """See `slipstream.dataset.SegRandomFlip`."""


class SegRandomGaussianBlur(_Callable, dataset.SegRandomGaussianBlur):
    """See `slipstream.dataset.SegRandomGaussianBlur`."""


class SegRandomRescale(_Callable, dataset.SegRandomRescale):
    """See `slipstream.dataset.SegRandomRescale`."""


class SegRandomRotate(_Callable, dataset.SegRandomRotate):
    """See `slipstream.dataset.SegRandomRotate`."""


class SegRescale(_Callable, dataset.SegRescale):
    """See `slipstream.dataset.SegRescale`."""


class SegResize(_Callable, dataset.SegResize):
    """See `slipstream.dataset.SegResize`."""


class SegStandardize(_Callable, dataset.SegStandardize):
    """See `slipstream.dataset.SegStandardize`."""
