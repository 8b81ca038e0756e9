"""Memory format of optimizer states."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from slipstream.dist.sharding import is_sharded

__all__ = ["lay_out_states"]


def lay_out_states(optimizer: Optimizer) -> None:
    """Convert the loaded states of an optimizer to the strides of their parameters.

    The states in a checkpoint have the memory format of the run that saved it (channels_last or not). torch's fused
    optimizers read parameters and states as flat arrays, so different strides silently produce wrong results.
    """
    for param, states in optimizer.state.items():
        if is_sharded(param):
            continue
        for name, value in states.items():
            if isinstance(value, Tensor) and value.shape == param.shape and value.stride() != param.stride():
                states[name] = torch.empty_like(param, dtype=value.dtype).copy_(value)
