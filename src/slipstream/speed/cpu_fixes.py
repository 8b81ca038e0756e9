"""Corrections of torch's CPU kernels that compute wrong values in the channels_last layout."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, get_kernel
from torch.nn.parameter import is_lazy

__all__ = ["correct_kernels"]

_VECTOR_WIDTH = 16
"""Number of float32 values in the largest vector register of an x86 processor."""
_LARGE_MEAN = 1.0
"""Absolute mean, in standard deviations, above which GroupNorm is computed again, with the mean subtracted first."""
_LARGE_MEAN_LOW_PRECISION = 10.0
"""The same for bfloat16 and float16, in which subtracting a small mean causes larger rounding errors."""
_MAX_PIXELS = 2**14
"""Number of pixels above which GroupNorm is computed in the default layout.

The kernel for the channels_last layout adds up all pixels of a channel one after the other, so the error of its sums
grows with their number.
"""


def correct_kernels(parameters: Iterable[Tensor]) -> None:
    """Replace torch's CPU kernels for the gradients of convolutions and for GroupNorm in this process.

    Inductor uses the channels_last layout for all convolutions on CPUs. The code that it generates calls these kernels
    through torch's dispatcher, unless `torch._inductor.config.cpp_wrapper` is set.

    - For a 1x1 convolution with a stride and fewer input channels than a vector register holds, oneDNN's weight
      gradient writes beyond the end of a buffer: gradients can be wrong, and memory is corrupted
      (https://github.com/uxlfoundation/oneDNN/issues/6035, in oneDNN 3.12, which torch 2.13 contains). The replacement
      selects every n-th pixel and computes the gradient of a convolution with a stride of 1, which is equivalent. It
      takes about 50 microseconds per convolution, so it is used only if one of the parameters has the shape of such a
      weight.
    - For GroupNorm, torch 2.13 computes the variance as the difference of two means, which is inaccurate if the mean is
      large: the relative error is 0.1 for a mean of 1,000 times the standard deviation. If the input does not require a
      gradient, the backward pass ends with a segmentation fault. The replacements compute the forward pass again with
      the mean subtracted if it is large. They compute the backward pass in the default layout if the input requires no
      gradient, and both passes for images of more than 2**14 pixels, which takes up to 20 times as long.
    """
    _replace("native_group_norm", _group_norm)
    _replace("native_group_norm_backward", _group_norm_backward)
    if any(is_lazy(param) or _is_affected(param) for param in parameters):
        _replace("convolution_backward", _convolution_backward)


@functools.cache  # torch restores the kernel when the `Library` is deleted
def _replace(name: str, replacement: Callable[..., Any]) -> Library:
    library = Library("aten", "IMPL")
    original = get_kernel(f"aten::{name}", "CPU")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*also be overridden", UserWarning)
        library.impl(name, functools.partial(replacement, original), "CPU", with_keyset=True)
    return library


def _is_affected(weight: Tensor) -> bool:
    """Return whether a weight, of shape (O, I, 1, 1), or (I, O, 1, 1) for transposed convolutions, can be affected.

    The weight gradient of a transposed convolution is that of a convolution from the output to the input.
    """
    return weight.ndim == 4 and weight.shape[2:] == (1, 1) and weight.shape[1] < _VECTOR_WIDTH


def _convolution_backward(
    original: Any, keys: Any, gradient: Tensor, x: Tensor, weight: Tensor, *options: Any
) -> tuple[Tensor | None, ...]:
    call = functools.partial(original.call_boxed, keys)
    _, stride, padding, _, transposed, _, groups, output_mask = options
    is_affected = _is_affected(weight) and max(stride) > 1 and not any(padding) and groups == 1
    if not is_affected or not any(output_mask[1:]):  # the same kernel computes the gradient of the bias
        result: tuple[Tensor | None, ...] = call(gradient, x, weight, *options)
        return result
    by_input = call(gradient, x, weight, *options[:-1], [True, False, False])[0] if output_mask[0] else None
    small = x if transposed else gradient
    slices = (slice(0, size * step, step) for size, step in zip(small.shape[2:], stride * 2, strict=False))
    select: tuple[Any, ...] = (..., *slices)
    pair = (gradient[select], x) if transposed else (gradient, x[select])
    unstrided = None, [1, 1], padding, [1, 1], transposed, [0, 0], groups, [False, output_mask[1], False]
    by_weight = call(*pair, weight, *unstrided)[1] if output_mask[1] else None
    by_bias = gradient.sum((0, 2, 3)) if output_mask[2] else None
    return by_input, by_weight, by_bias


def _group_norm(original: Any, keys: Any, x: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, _, samples, channels, pixels, groups, _ = options
    if pixels > _MAX_PIXELS and not x.is_contiguous():
        y, mean, rstd = original.call_boxed(keys, x.contiguous(), *options)
        return torch.empty_like(x).copy_(y), mean, rstd
    result: tuple[Tensor, Tensor, Tensor] = original.call_boxed(keys, x, *options)
    _, mean, rstd = result
    limit = _LARGE_MEAN if x.dtype in (torch.float32, torch.float64) else _LARGE_MEAN_LOW_PRECISION
    if x.is_contiguous() or ((mean.abs() * rstd <= limit) & (rstd > 0)).all():
        return result
    shift = mean.repeat_interleave(channels // groups, dim=1).view(samples, channels, *[1] * (x.ndim - 2))
    y, rest, rstd = original.call_boxed(keys, (x - shift).to(x.dtype), *options)
    return y, mean + rest, rstd


def _group_norm_backward(
    original: Any, keys: Any, gradient: Tensor, x: Tensor, *args: Any
) -> tuple[Tensor | None, ...]:
    pixels, output_mask = args[-3], args[-1]
    if output_mask[0] and (pixels <= _MAX_PIXELS or x.is_contiguous()):
        result: tuple[Tensor | None, ...] = original.call_boxed(keys, gradient, x, *args)
        return result
    by_input, *others = original.call_boxed(keys, gradient.contiguous(), x.contiguous(), *args)
    return (None if by_input is None else torch.empty_like(x).copy_(by_input)), *others
