"""Test that steps that use host tensors are not replayed, because a CUDA graph does not repeat work on the host."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "step"))

import graphs
from tape import Tape

from slipstream.optim import OptimWrapper
from slipstream.step.cuda_graph import CudaGraphs

OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, eps=1e-3),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05),
    "Adagrad, fused": partial(torch.optim.Adagrad, lr=0.05, fused=True),
}
ON_HOST = {"Adagrad"}
"""Optimizers that count their steps on the host."""


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_only_steps_without_host_tensors_are_replayed(name):
    data = graphs.batches(16)
    expected, _, _ = graphs.by_hand(OPTIMIZERS[name], data)
    model = graphs.net().to("npu")
    optim, tape, said = OptimWrapper(optimizer=OPTIMIZERS[name](model.parameters())), Tape(), []
    options = dict(cuda_graphs=lambda: CudaGraphs(tape, pytest.fail), dynamic=False, info=said.append)
    step = graphs.graph_step(model, optim, **options)
    for inputs, targets in data:
        step((inputs.to("npu"), targets.to("npu")))
    found = {key: value.cpu() for key, value in model.state_dict().items()}
    torch.testing.assert_close(found, dict(expected.state_dict()), rtol=1e-5, atol=1e-6)
    assert bool(tape.replayed) == (name not in ON_HOST)
    assert any("not replayed as a CUDA graph" in line for line in said) == (name in ON_HOST)
