"""Tests of communication hooks in one process: rounding and invalid options."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from slipstream.errors import ConfigError
from slipstream.model import MMDistributedDataParallel


@pytest.fixture(autouse=True)
def _group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapped(how, size=(12, 16)):
    torch.manual_seed(0)
    return MMDistributedDataParallel(nn.Linear(size[1], size[0], bias=False), comm_hook=how)


def receive(model, gradient):
    """Return the gradient that the parameter receives if its local gradient is `gradient`."""
    model.module.weight.grad = None
    rows = torch.eye(gradient.shape[1])
    (model(rows) * gradient.T).sum().backward()
    return model.module.weight.grad.clone()


def matrix(rank, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(12, rank, generator=generator) @ torch.randn(rank, 16, generator=generator)


@pytest.mark.parametrize(("how", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_precision_rounds_the_gradient_once(how, dtype):
    gradient = matrix(5)
    assert torch.equal(receive(wrapped(how), gradient), gradient.to(dtype).float())


def test_unknown_hook_raises_an_error_that_names_the_replacement():
    with pytest.raises(
        ConfigError, match=r"comm_hook: must be one of bf16, fp16, not 'powersgd'.*register_comm_hook"
    ):
        wrapped("powersgd")
