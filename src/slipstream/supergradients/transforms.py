"""SuperGradients' transforms, which a user's own dataset can also call with the sample as the only argument."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from slipstream import dataset
from slipstream.extras import extra
from slipstream.supergradients.names import TRANSFORMS
from slipstream.training.factories import default_fill_mask

__all__ = [*TRANSFORMS]


class _Callable:
    """Mixin for transforms that can be called as `transform(sample)`, with a seed drawn from Python's `random`."""

    def __call__(self, sample: Mapping[str, Any], rng: np.random.Generator | None = None) -> dict[str, Any]:
        """Return the transformed sample.

        Args:
            sample: a dict whose `image` and `mask` are Pillow images or arrays. A Pillow image is returned as a
                Pillow image if the result is a uint8 array.
            rng: the generator that Slipstream's datasets pass; `image` and `mask` must then be arrays.
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


class SegConvertToTensor(_Callable, dataset.SegConvertToTensor):
    """Convert the image to a float32 tensor (C, H, W), and the mask to a tensor (H, W).

    In the `transforms` of Slipstream's datasets, this transform has no effect, because the datasets return tensors.
    """

    def __call__(self, sample: Mapping[str, Any], rng: np.random.Generator | None = None) -> dict[str, Any]:
        """Return a sample of tensors; with `rng`, return the sample unchanged."""
        if rng is not None:
            return dict(sample)
        image, mask = (torch.from_numpy(np.array(sample[key])) for key in ("image", "mask"))
        is_int64 = self.mask_output_dtype is not None
        return {**sample, "image": image.permute(2, 0, 1).float(), "mask": mask.long() if is_int64 else mask}


class SegPadShortToCropSize(_Callable, dataset.SegPadShortToCropSize):
    """See `slipstream.dataset.SegPadShortToCropSize`; if `fill_mask` is None, 0 is used and a warning is logged."""

    def __init__(
        self,
        crop_size: int | Sequence[int],
        fill_mask: int | None = None,
        fill_image: int | Sequence[int] = 0,
        **options: Any,
    ) -> None:
        fill_mask = default_fill_mask() if fill_mask is None else fill_mask
        super().__init__(crop_size, fill_mask, fill_image, **options)


def _callable(name: str) -> type:
    """Return a subclass of Slipstream's transform that can be called with a single argument."""
    doc = f"See `slipstream.dataset.{name}`."
    return type(name, (_Callable, getattr(dataset, name)), {"__module__": __name__, "__doc__": doc})


globals().update({name: _callable(name) for name in TRANSFORMS if name not in globals()})
