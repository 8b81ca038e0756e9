"""Call transforms of any origin: Slipstream's own, those of Albumentations and torchvision, and functions of users."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from slipstream.errors import ConfigError


def call_transform(transform: Any, sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Return the transformed sample.

    Args:
        transform: a function of a sample and a generator, or of a sample only; or an object of a library.
        sample: `image`, uint8 (H, W, 3), and optionally `mask`, uint8 (H, W). After normalization, `image` is a float
            array (H, W, 3), or a float tensor (3, H, W).
        rng: generator of the sample.
    """
    kind: Any = type(transform)
    if (library := _library(kind)) is None:
        return transform(sample, rng) if _takes_generator(transform) else transform(sample)
    if library == "kornia":
        raise ConfigError(
            f"kornia's {kind.__name__} transforms batches on the device; pass it to the data preprocessor: "
            "data_preprocessor=dict(type='ImgDataPreprocessor', batch_augments=[...])",
            "transforms",
        )
    writable = {key: value if _is_writable(value) else value.copy() for key, value in sample.items()}
    if library == "albumentations":
        result = transform(**writable)
    elif library == "torchvision.transforms.v2":
        result = _call_v2(transform, writable)
    elif "mask" in sample:
        message = f"torchvision.transforms.{kind.__name__} ignores masks; use torchvision.transforms.v2"
        raise ConfigError(message, "transforms")
    else:
        result = {"image": transform(_pillow(writable["image"]))}
    return {key: _plain(result[key]) for key in sample}


def call_image_transform(transform: Any, image: Any, rng: np.random.Generator) -> Any:
    """Return the transformed image; it is an array or tensor (3, H, W) before and after the transform."""
    kind: Any = type(transform)
    if _library(kind) is None:
        return transform(image, rng) if _takes_generator(transform) else transform(image)
    rows = image if isinstance(image, Tensor) else image.transpose(1, 2, 0)
    result = call_transform(transform, {"image": rows}, rng)["image"]
    return result if isinstance(result, Tensor) else result.transpose(2, 0, 1)


def is_uint8(value: Any) -> bool:
    """Return whether a value is a uint8 array."""
    return isinstance(value, np.ndarray) and value.dtype == np.uint8


@functools.cache
def _library(kind: Any) -> str | None:
    """Return the library whose transforms have this class, or None for functions and other classes."""
    modules = [base.__module__ + "." for base in kind.__mro__]
    names = ("albumentations", "kornia", "torchvision.transforms.v2", "torchvision")
    return next((name for name in names if any(module.startswith(name + ".") for module in modules)), None)


def _takes_generator(transform: Any) -> bool:
    if inspect.isroutine(transform) or isinstance(transform, functools.partial):
        return _has_second_parameter(transform, 0)
    kind: Any = type(transform)
    return _has_second_parameter(kind.forward if issubclass(kind, nn.Module) else kind.__call__, 1)


@functools.lru_cache
def _has_second_parameter(function: Any, start: int) -> bool:
    """Return whether a function requires two arguments, or has a parameter `rng`; the first `start` are not counted."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a built-in function
        return False
    named = [p for p in list(parameters.values())[start:] if p.kind not in (p.VAR_KEYWORD, p.KEYWORD_ONLY)]
    required = [p for p in named if p.default is p.empty or p.name == "rng"]
    return len(required) > 1 or any(p.kind is p.VAR_POSITIONAL for p in named)


def _call_v2(transform: Any, sample: dict[str, Any]) -> dict[str, Any]:
    from torchvision.tv_tensors import Image, Mask

    kinds = {"image": Image, "mask": Mask}
    values = [
        kinds[key](value if isinstance(value, Tensor) else torch.from_numpy(_planes(value)))
        for key, value in sample.items()
    ]
    result = transform(*values)
    return dict(zip(sample, result if len(values) > 1 else [result], strict=True))


def _planes(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return value.transpose(2, 0, 1) if value.ndim == 3 else value


def _is_writable(value: Any) -> bool:
    return isinstance(value, Tensor) or value.flags.writeable


def _pillow(image: Any) -> Any:
    """Return a uint8 array as a Pillow image, which torchvision's first transforms require."""
    if not is_uint8(image):
        return image
    from PIL import Image

    return Image.fromarray(image)


def _plain(value: Any) -> Any:
    """Return an image or a mask as an array, or a tensor if its values are not uint8."""
    if not isinstance(value, Tensor):
        return np.asarray(value)
    value = value.as_subclass(Tensor)
    if value.dtype is not torch.uint8:
        return value
    return (value.permute(1, 2, 0) if value.ndim == 3 else value).numpy()
