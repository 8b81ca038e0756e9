"""Test that activation checkpointing on an NPU recomputes blocks with the random numbers of the forward pass."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from slipstream.speed.activation_checkpointing import (
    ActivationCheckpointingOptions,
    checkpoint_activations,
)


@dataclass
class Hidden:
    """A container in which torch does not search for tensors."""

    values: torch.Tensor


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, hidden):
        return Hidden(self.layers(hidden.values))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        hidden = Hidden(x)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.values.square().mean()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("offload", [False, True])
def test_dropout_in_a_block_with_hidden_inputs_is_recomputed(offload, autocast):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to("npu")
    found = []
    for options in (None, ActivationCheckpointingOptions(offload=offload)):
        net = Net().to("npu")
        if options is not None:
            checkpoint_activations(net, options)
        torch.manual_seed(2)
        with torch.autocast("npu", torch.bfloat16, enabled=autocast):
            loss = net(x)
        found.append([grad.cpu() for grad in torch.autograd.grad(loss, list(net.parameters()))])
    torch.testing.assert_close(*found, rtol=0, atol=0)
