"""Speed option: `channels_last` memory format for convolution weights and images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

__all__ = ["as_channels_last", "to_channels_last"]

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_IMAGE_DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def to_channels_last(model: nn.Module, weights: bool = True) -> None:
    """Convert convolution weights in place, and add a hook that converts each batch before the forward pass.

    The Parameter objects do not change, and loading a state dict preserves their memory format. The hook runs in
    training and validation. It does not copy batches that already have this format.

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
    if _convert_batch not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_convert_batch, with_kwargs=True)


def as_channels_last(batch: Any) -> Any:
    """Return a batch (nested dicts, lists and tuples) with its images (4-d or 5-d tensors) in channels_last."""
    return tree_map_only(Tensor, _convert, batch)


def _convert(tensor: Tensor) -> Tensor:
    if tensor.dtype not in _IMAGE_DTYPES or tensor.ndim not in _FORMATS:
        return tensor
    return tensor.contiguous(memory_format=_FORMATS[tensor.ndim])


def _convert_batch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return as_channels_last((args, kwargs))
