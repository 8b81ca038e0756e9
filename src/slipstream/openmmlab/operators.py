"""Run mmcv's compiled operators on bfloat16 tensors, which they do not support."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function

from slipstream.logging import print_log

__all__ = ["compute_bf16_operators_in_float32"]

_PACKAGE = "mmcv.ops"
_MARK = "_slipstream_bf16"


def compute_bf16_operators_in_float32() -> None:
    """Make the module-level autograd functions of the imported mmcv operators accept bfloat16 tensors.

    mmcv's operators support float16, float32 and float64 only. As in torchvision's operators under autocast, bfloat16
    arguments are converted to float32, and the float32 results are converted to bfloat16. Calls without bfloat16
    tensors, and operators that are not autograd functions, are unchanged. Functions that are already prepared are
    skipped.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{_PACKAGE}."):
            for value in list(vars(module).values()):
                if inspect.isclass(value) and issubclass(value, Function) and value.__module__ == name:
                    _prepare(value)


def _prepare(function: type[Function]) -> None:
    if _MARK in vars(function):
        return
    setattr(function, _MARK, True)
    if "forward" in vars(function):
        function.forward = staticmethod(_forward_in_float32(function.forward))  # type: ignore[method-assign]
    if "backward" in vars(function):
        function.backward = staticmethod(_in_float32(function.backward))  # type: ignore[method-assign]


def _forward_in_float32(forward: Callable[..., Any]) -> Callable[..., Any]:
    parameters = list(inspect.signature(forward).parameters)[1:]
    compute = _in_float32(forward)

    @functools.wraps(forward)
    def wrapper(ctx: Any, *args: Any) -> Any:
        result = compute(ctx, *args)
        if not any(map(_is_bf16, args)):
            return result
        if _is_bf16(dict(zip(parameters, args, strict=False)).get("rois")):
            _warn_about_rounded_boxes()
        return tuple(map(_to_bf16, result)) if isinstance(result, tuple) else _to_bf16(result)

    return wrapper


def _in_float32(method: Callable[..., Any]) -> Callable[..., Any]:
    """Convert the bfloat16 arguments. Autograd converts each gradient to the dtype of its input."""

    @functools.wraps(method)
    def wrapper(ctx: Any, *args: Any) -> Any:
        device_type = next((value.device.type for value in args if _is_bf16(value)), None)
        if device_type is None:
            return method(ctx, *args)
        # Operators can call matrix products, which autocast would compute in bfloat16.
        with torch.autocast(device_type, enabled=False):
            return method(ctx, *(value.float() if _is_bf16(value) else value for value in args))

    return wrapper


@functools.cache
def _warn_about_rounded_boxes() -> None:
    # mmdetection's RoI extractors convert the boxes to the dtype of the feature maps.
    print_log(
        "The forward pass uses bfloat16, so mmdetection rounds the coordinates of boxes to bfloat16 (8 significant "
        "bits) before it extracts their features: a coordinate of about 1,000 pixels changes by up to 2 pixels. To "
        "prevent this, train in float32 (remove precision=bf16 or AmpOptimWrapper)",
        "current",
        logging.WARNING,
    )


def _is_bf16(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16


def _to_bf16(value: Any) -> Any:
    is_float32 = isinstance(value, torch.Tensor) and value.dtype == torch.float32
    return value.bfloat16() if is_float32 else value
