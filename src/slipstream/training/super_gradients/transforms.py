"""SuperGradients' transforms, which a user's own dataset can also call with the sample as the only argument."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from slipstream import dataset
from slipstream.extras import extra
from slipstream.training.params import default_fill_mask


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


class _Entry(dict[str, Any]):
    """The processing step `{Name: {arguments}}`, as in recipes, for `Network.set_dataset_processing_params`."""

    defaults: Mapping[str, Any] = {}

    def __init__(self, *values: Any, **arguments: Any) -> None:
        named = {**self.defaults, **dict(zip(self.defaults, values, strict=False)), **arguments}
        super().__init__({type(self).__name__: {key: v for key, v in named.items() if v is not None}})


# SuperGradients' processing classes, and their arguments in order, with the defaults.
_ENTRIES: Mapping[str, Mapping[str, Any]] = {
    "CenterCrop": {"size": 224},
    "ComposeProcessing": {"processings": None},
    "ImagePermute": {"permutation": (2, 0, 1)},
    "NormalizeImage": {"mean": None, "std": None},
    "Resize": {"size": 224},
    "SegmentationPadShortToCropSize": {"crop_size": None, "fill_image": 0, "fill_mask": 0},
    "SegmentationRescale": {"scale_factor": None, "short_size": None, "long_size": None},
    "StandardizeImage": {"max_value": 255.0},
}


def __getattr__(name: str) -> type:
    """Return a processing class, or a subclass of Slipstream's transform that can be called with one argument."""
    if name in _ENTRIES:
        kind = type(name, (_Entry,), {"__module__": __name__, "defaults": _ENTRIES[name]})
    elif name.startswith("Seg") and hasattr(dataset, name):
        kind = type(name, (_Callable, getattr(dataset, name)), {"__module__": __name__})
    else:
        raise AttributeError(name)
    globals()[name] = kind
    return kind
