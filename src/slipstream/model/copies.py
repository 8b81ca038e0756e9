"""Copy models that `copy.deepcopy` does not support."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["copy_model", "copy_sharded"]


def copy_model(model: nn.Module) -> nn.Module:
    """Return a copy of the model without DDP wrappers, which are required only for training.

    `deepcopy` does not support tensors that are computed from parameters, such as the weights stored by pruning and
    `weight_norm`. These tensors are detached and cloned. Tensors that overlap in memory, and expanded tensors, get
    memory of their own, because the average of each is updated in place.
    """
    attributes = [value for module in model.modules() for value in vars(module).values()]
    computed = [value for value in attributes if isinstance(value, Tensor) and not value.is_leaf]
    memo: dict[int, Any] = {id(value): value.detach().clone() for value in computed}
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            memo[id(module)] = copy.deepcopy(module.module, memo)
    copied = copy.deepcopy(model, memo)
    tensors = [
        t for t in chain(copied.parameters(), copied.buffers()) if type(t.data) is Tensor and t.numel()
    ]
    end = 0
    for tensor in sorted((t for t in tensors if t.layout is torch.strided), key=Tensor.data_ptr):
        start, steps = tensor.data_ptr(), zip(tensor.shape, tensor.stride(), strict=True)
        size = (sum((count - 1) * stride for count, stride in steps) + 1) * tensor.itemsize
        if start < end or size < tensor.nbytes:
            tensor.data = tensor.detach().clone()
        end = max(end, start + size)
    return copied


def copy_sharded(model: nn.Module) -> nn.Module:
    """Return a module that contains copies of a sharded model's tensors and has no `forward` method.

    `deepcopy` does not support sharded models.
    """
    modules: dict[Any, nn.Module] = {module: nn.Module() for module in model.modules()}
    copies: dict[Any, Any] = {p: nn.Parameter(p.detach().clone(), False) for p in model.parameters()}
    copies.update({buffer: buffer.clone() for buffer in model.buffers()})
    for module, new in modules.items():
        new._parameters = {name: copies.get(param) for name, param in module._parameters.items()}
        new._buffers = {name: copies.get(buffer) for name, buffer in module._buffers.items()}
        new._modules = {name: modules.get(child) for name, child in module._modules.items()}
        new._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    return modules[model]
