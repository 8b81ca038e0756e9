"""Memory format of gradients and optimizer states.

torch's fused optimizers read parameters, gradients and states as flat arrays, so different strides silently produce
wrong results.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from slipstream.dist.sharding import is_sharded

__all__ = ["lay_out_gradients", "lay_out_states"]


def lay_out_states(optimizer: Optimizer) -> None:
    """Convert the loaded states of an optimizer to the strides of their parameters.

    The states in a checkpoint have the memory format of the run that saved it (channels_last or not).
    """
    for param, states in optimizer.state.items():
        if is_sharded(param):
            continue
        for name, value in states.items():
            if isinstance(value, Tensor) and value.shape == param.shape and value.stride() != param.stride():
                states[name] = torch.empty_like(param, dtype=value.dtype).copy_(value)


def lay_out_gradients(optimizer: Optimizer) -> None:
    """Convert the gradients of fused parameter groups to the strides of their parameters.

    Autograd creates gradients with these strides. Only code that sets `p.grad` can change them.
    """
    for group in optimizer.param_groups:
        if not group.get("fused"):
            continue
        for param in group["params"]:
            grad = param.grad
            if grad is None or grad.layout is not torch.strided or grad.stride() == param.stride():
                continue
            if not is_sharded(param):
                param.grad = torch.empty_like(param, dtype=grad.dtype, requires_grad=False).copy_(grad)
