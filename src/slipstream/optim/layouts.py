"""The memory layout of an optimizer's states."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from slipstream.dist.sharding import is_sharded

__all__ = ["lay_out_states"]


def lay_out_states(optimizer: Optimizer) -> None:
    """Give the states of an optimizer, after they were loaded, the memory layout of their parameters.

    Those of a checkpoint have the layout of the run that wrote it (channels_last, or not). torch's fused optimizers
    read parameter and state as one flat array each: with different layouts they compute wrong numbers, silently.
    """
    for param, states in optimizer.state.items():
        if is_sharded(param):
            continue
        for name, value in states.items():
            if isinstance(value, Tensor) and value.shape == param.shape and value.stride() != param.stride():
                states[name] = torch.empty_like(param, dtype=value.dtype).copy_(value)
