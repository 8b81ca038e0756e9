"""Corrections of modules that torch computes incorrectly on CPUs in the channels_last layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

__all__ = ["correct_group_norms", "correct_strided_convolutions"]

_VECTOR_WIDTH = 16
"""Number of float32 values in the largest vector register of an x86 processor."""


def correct_strided_convolutions(model: nn.Module, warn: Callable[[str], None]) -> None:
    """Make the affected convolutions select every n-th pixel first and use a stride of 1, which is equivalent.

    For a 1x1 convolution with a stride and fewer input channels than a vector register holds, oneDNN's weight gradient
    in the channels_last layout writes beyond the end of a buffer: gradients can be wrong, and memory is corrupted
    (https://github.com/uxlfoundation/oneDNN/issues/6035, in oneDNN 3.12, which torch 2.13 contains). Inductor uses this
    layout for all convolutions on CPUs. For affected transposed convolutions, and for classes that compute the
    convolution themselves, `warn` is called instead.
    """
    for name, module in model.named_modules():
        if not _is_affected(module):
            continue
        kind = type(module)
        if (
            issubclass(kind, nn.Conv2d)
            and kind.forward is nn.Conv2d.forward
            and kind._conv_forward is nn.Conv2d._conv_forward
        ):
            module._conv_forward = partial(_convolve_selected, module.stride)
        else:
            replacement = (
                "Use nn.Conv2d's own forward, or" if issubclass(kind, nn.Conv2d) else "To prevent this,"
            )
            warn(
                f"The weight gradient of '{name}' ({kind.__name__}, with a 1x1 kernel, a stride and fewer than "
                f"{_VECTOR_WIDTH} channels) can be wrong in the channels_last layout, which channels_last and compile "
                f"use on CPUs (https://github.com/uxlfoundation/oneDNN/issues/6035). {replacement} disable both options"
            )


def correct_group_norms(model: nn.Module) -> None:
    """Let GroupNorm modules convert their inputs to the default layout.

    In the channels_last layout, torch 2.13 computes the variance as the difference of two means, which is inaccurate if
    the mean is large: the relative error is 0.1 for a mean of 1,000 times the standard deviation. If the input does not
    require a gradient, the backward pass ends with a segmentation fault. Calls of `F.group_norm` are not changed.
    """
    for module in model.modules():
        if isinstance(module, nn.GroupNorm) and _make_contiguous not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_make_contiguous, with_kwargs=True)


def _make_contiguous(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return tree_map_only(Tensor, Tensor.contiguous, (args, kwargs))


def _is_affected(module: nn.Module) -> bool:
    if not isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        return False
    channels = module.out_channels if module.transposed else module.in_channels  # 0 if unknown (LazyConv2d)
    has_padding = module.padding != "valid" and any(module.padding)
    return (
        set(module.kernel_size) == {1}
        and max(module.stride) > 1
        and not has_padding
        and module.groups == 1
        and channels < _VECTOR_WIDTH
    )


def _convolve_selected(stride: tuple[int, int], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.conv2d(x[..., :: stride[0], :: stride[1]], weight, bias)
