"""Utilities for image batches and modules."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.errors import ConfigError
from slipstream.logging import print_log
from slipstream.model import convert_sync_batchnorm as convert_own
from slipstream.model import revert_sync_batchnorm

__all__ = [
    "convert_sync_batchnorm",
    "detect_anomalous_params",
    "merge_dict",
    "revert_sync_batchnorm",
    "stack_batch",
]


def stack_batch(tensor_list: list[Tensor], pad_size_divisor: int = 1, pad_value: float = 0) -> Tensor:
    """Pad tensors (C, ...) to a common size at the end of all dimensions except the first, and stack them.

    Args:
        tensor_list: the tensors; they must have the same number of dimensions.
        pad_size_divisor: the common sizes are rounded up to multiples of this number.
        pad_value: padding value.
    """
    assert isinstance(tensor_list, list), f"tensor_list must be a list, not {type(tensor_list)}"
    assert tensor_list, "tensor_list must not be empty"
    assert len({tensor.ndim for tensor in tensor_list}) == 1, (
        "the tensors must have the same number of dimensions"
    )
    largest = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensor_list), strict=True)]
    common = [math.ceil(size / pad_size_divisor) * pad_size_divisor for size in largest]

    def pad(tensor: Tensor) -> Tensor:
        missing = [target - size for target, size in zip(common, tensor.shape[1:], strict=True)]
        # F.pad starts with the last dimension.
        pairs = [amount for end in reversed(missing) for amount in (0, end)]
        return F.pad(tensor, pairs, value=pad_value) if any(missing) else tensor

    return torch.stack([pad(tensor) for tensor in tensor_list])


def merge_dict(*args: dict[Any, Any]) -> dict[Any, Any]:
    """Merge the dicts into one."""
    return {key: value for part in args for key, value in part.items()}


def detect_anomalous_params(loss: Tensor, model: nn.Module) -> None:
    """Log the trainable parameters of `model` that do not contribute to `loss`."""
    nodes = [loss.grad_fn]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [source for source, _ in node.next_functions]
    used = {id(node.variable) for node in seen if hasattr(node, "variable")}
    for name, param in model.named_parameters():
        if param.requires_grad and id(param) not in used:
            print_log(f"The loss does not depend on {name} {tuple(param.shape)}", "current", logging.ERROR)


def convert_sync_batchnorm(module: nn.Module, implementation: str = "torch") -> nn.Module:
    """Replace every BatchNorm in a module with a `SyncBatchNorm`, and return the module.

    Raises:
        ConfigError: if `implementation` is neither `torch` nor `mmcv`. (Both select Slipstream's `SyncBatchNorm`.)
    """
    if implementation not in ("torch", "mmcv"):
        raise ConfigError(f"must be 'torch' or 'mmcv', not {implementation!r}", "implementation")
    return convert_own(module)
