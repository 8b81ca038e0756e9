"""Speed option: `channels_last` memory format for convolution weights and images."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map_only

from slipstream.errors import ConfigError

__all__ = ["as_channels_last", "check_cpu_kernels", "has_incorrect_gradient", "to_channels_last"]

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_VECTOR_WIDTH = 16  # number of float32 values in the largest vector register of an x86 processor
_IMAGE_DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def to_channels_last(model: nn.Module, weights: bool = True) -> None:
    """Convert convolution weights in place, and the model's inputs in each call, in training and validation.

    The Parameter objects do not change, and loading a state dict preserves their memory format. Batches that already
    have this format are not copied. If the model changes an input in place, the change is copied to the batch, and
    later batches are not converted.

    Args:
        model: the unwrapped model. Convert it before wrapping, because DDP creates its buckets in the memory format of
            the weights.
        weights: whether to convert the weights. Pass False for a model that is sharded with `fully_shard`, which
            requires contiguous weights. With channels_last batches, the convolutions still use this format.
    """
    for module in model.modules() if weights else ():
        weight = module._parameters.get("weight")
        if isinstance(module, _ConvNd) and weight is not None and not is_lazy(weight):
            weight.data = _convert(weight.data)
    forward = model.forward
    if not (isinstance(forward, partial) and forward.func is _call_converted):
        model.forward = update_wrapper(
            partial(_call_converted, forward, SimpleNamespace(active=True)), forward
        )


def check_cpu_kernels(model: nn.Module) -> None:
    """Check that torch's CPU kernels support the model in channels_last.

    - For a 1x1 convolution with a stride and fewer than 16 input channels, oneDNN's weight gradient is wrong, and
      writes beyond the end of a buffer (https://github.com/uxlfoundation/oneDNN/issues/6035, in torch 2.13).
    - GroupNorm is inaccurate if the mean of its input is large, and its backward pass ends with a segmentation fault if
      the input requires no gradient.

    Raises:
        ConfigError: the model contains such a module.
    """
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        strided = not isinstance(module, _ConvNd) or max(module.stride) > 1
        known = strided and weight is not None and not is_lazy(weight)
        if isinstance(module, nn.GroupNorm) or (known and has_incorrect_gradient(weight)):
            raise ConfigError(
                f"torch's CPU kernels for '{name}' ({type(module).__name__}) compute wrong results in this layout; "
                "remove the option on CPUs",
                "channels_last",
            )


def has_incorrect_gradient(weight: Any) -> bool:
    """Return whether a convolution with a stride and this weight, of shape (O, I, H, W), can have a wrong gradient."""
    return weight.ndim == 4 and tuple(weight.shape[2:]) == (1, 1) and weight.shape[1] < _VECTOR_WIDTH


def as_channels_last(batch: Any) -> Any:
    """Return a batch (nested dicts, lists and tuples) with its images (4-d or 5-d tensors) in channels_last."""
    return tree_map_only(Tensor, _convert, batch)


def _convert(tensor: Tensor) -> Tensor:
    memory_format = _FORMATS.get(tensor.ndim)
    if memory_format is None or tensor.dtype not in _IMAGE_DTYPES:
        return tensor
    converts = tensor.is_contiguous() and not tensor.is_contiguous(memory_format=memory_format)
    if tensor.requires_grad and converts:
        return _Convert.apply(tensor)
    return tensor.contiguous(memory_format=memory_format)


class _Convert(torch.autograd.Function):
    """Converts a contiguous tensor, and returns a contiguous gradient, so that a gradient penalty can use `view`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor) -> Tensor:
        return tensor.contiguous(memory_format=_FORMATS[tensor.ndim])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


def _call_converted(forward: Callable[..., Any], state: SimpleNamespace, *args: Any, **kwargs: Any) -> Any:
    """Call `forward` with inputs in channels_last. A `partial` of this function, which can be pickled, replaces it.

    If the model changes its inputs in place, copy the changes to the batch, and set `state.active` to False. Such
    changes are found in eager calls, of which a compiled step or model makes at least one before its graph runs. A
    verification does not put back `state`, because captured code would not find the changes.
    """
    if not state.active:
        return forward(*args, **kwargs)
    new_args, new_kwargs = as_channels_last((args, kwargs))
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():  # tensors have no versions
        return forward(*new_args, **new_kwargs)
    pairs = zip(tree_leaves((args, kwargs)), tree_leaves((new_args, new_kwargs)), strict=True)
    copies = [(old, new, new._version) for old, new in pairs if new is not old]
    outputs = forward(*new_args, **new_kwargs)
    for old, new, version in copies:
        if new._version != version:
            state.active = False
            old.copy_(new)
    return outputs
