"""Option: `channels_last` keeps the channels of a pixel adjacent in memory, which fast convolutions prefer."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

__all__ = ["as_channels_last", "to_channels_last"]

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_PIXELS = (torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64)

T = TypeVar("T")


def to_channels_last(model: nn.Module, weights: bool = True) -> None:
    """Lay out, in place, the weights of convolutions so, and every batch that enters `model`.

    The parameters stay the same objects, and what is loaded into them takes their layout. Batches are laid out by a
    hook before forward, in training and validation; a batch that arrives so is not copied.

    Args:
        model: not wrapped yet: DDP makes its buckets in the layout of the weights.
        weights: False for a model that `fully_shard` is to shard or has sharded: it wants weights as they come. The
            batches alone make its convolutions work so.
    """
    for module in model.modules() if weights else ():
        weight = module._parameters.get("weight")
        if isinstance(module, _ConvNd) and weight is not None and not is_lazy(weight):
            weight.data = _laid_out(weight.data)
    if _lay_out_batch not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_lay_out_batch, with_kwargs=True)


def as_channels_last(batch: T) -> T:
    """Return nested dicts, lists and tuples with their images so: float and uint8 tensors of 4 or 5 dimensions.

    Those that are so already are returned as they are, and anything else, too.
    """
    laid_out: T = tree_map_only(Tensor, _laid_out, batch)
    return laid_out


def _laid_out(tensor: Tensor) -> Tensor:
    if tensor.dtype not in _PIXELS or tensor.ndim not in _FORMATS:
        return tensor
    return tensor.contiguous(memory_format=_FORMATS[tensor.ndim])


def _lay_out_batch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return as_channels_last((args, kwargs))
