"""Tests of model wrappers in one process. The tests with several processes are in tests/distributed."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slipstream.model import (
    BaseModel,
    MMDistributedDataParallel,
    MMSeparateDistributedDataParallel,
    is_model_wrapper,
    unwrap_model,
)
from slipstream.optim import OptimWrapper
from slipstream.registry import MODEL_WRAPPERS


@pytest.fixture(autouse=True)
def _group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Net(BaseModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(2, 1)

    def forward(self, x, y, mode):
        out = self.fc(x)
        return {"loss": (out - y).square().mean()} if mode == "loss" else out

    def parse_losses(self, losses):
        total, logs = super().parse_losses(losses)
        return 3 * total, logs


def test_train_step_of_the_wrapper_matches_the_model():
    plain, wrapped = Net(), MMDistributedDataParallel(Net())
    data = (torch.ones(2, 2), torch.zeros(2, 1))
    for model in (plain, wrapped):
        model.train_step(data, OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1)))
    assert torch.equal(wrapped.module.fc.weight, plain.fc.weight)
    assert torch.equal(wrapped.val_step(data), plain.val_step(data))
    assert torch.equal(wrapped.test_step(data), plain.test_step(data))


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
def test_buffers_are_not_broadcast_by_default(options):
    assert not MMDistributedDataParallel(Net(), **options).broadcast_buffers
    assert MMDistributedDataParallel(Net(), broadcast_buffers=True, **options).broadcast_buffers


def test_unwrap_model_removes_every_wrapper():
    @MODEL_WRAPPERS.register_module()
    class Mine(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    net = Net()
    try:
        assert unwrap_model(Mine(DistributedDataParallel(net))) is net
        assert is_model_wrapper(Mine(net))
    finally:
        del MODEL_WRAPPERS.module_dict["Mine"]
    assert unwrap_model(net) is net


class Gan(BaseModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.critic = nn.Linear(2, 1)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def train_step(self, data, optim_wrapper):
        loss = self.critic(self.generator(data)).mean()
        optim_wrapper.update_params(loss)
        return {"loss": loss.detach()}

    def forward(self, x, mode="tensor"):
        return self.critic(self.generator(x))


def test_separate_wrapper_wraps_each_trainable_child_and_runs_the_train_step_of_the_model():
    gan = Gan()
    start = gan.generator[0].weight.detach().clone()
    wrapped = MMSeparateDistributedDataParallel(gan, find_unused_parameters=True)
    assert isinstance(gan.generator, MMDistributedDataParallel)
    assert gan.critic.find_unused_parameters
    assert type(gan.frozen) is nn.Linear
    with wrapped.no_sync():
        assert not gan.generator.require_backward_grad_sync
        assert not gan.critic.require_backward_grad_sync
    assert gan.generator.require_backward_grad_sync
    wrapped.train_step(torch.rand(4, 2), OptimWrapper(torch.optim.SGD(gan.parameters(), lr=1.0)))
    assert not torch.equal(gan.generator.module[0].weight, start)
    assert unwrap_model(wrapped) is gan


def test_separate_wrapper_does_not_change_checkpoint_keys():
    plain, wrapped = Gan(), Gan()
    state = copy.deepcopy(plain.state_dict())
    MMSeparateDistributedDataParallel(wrapped)
    assert wrapped.state_dict().keys() == state.keys()
    state["generator.0.weight"].fill_(5)
    assert not any(wrapped.load_state_dict(state, strict=True))
    assert wrapped.generator.module[0].weight.unique().tolist() == [5]
    assert not any(plain.load_state_dict(wrapped.state_dict(), strict=True))


def test_attributes_are_those_of_the_model_except_those_of_the_wrappers_class():
    wrapped = MMDistributedDataParallel(Net())
    wrapped.scale, forward = 0.5, wrapped.forward
    wrapped.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    wrapped.compile(backend="eager")
    assert (wrapped.module.scale, wrapped.module._compiled_call_impl) == (0.5, None)
    assert vars(wrapped).keys() >= {"forward", "_compiled_call_impl"}
    data = (torch.ones(2, 2), torch.zeros(2, 1))
    assert torch.equal(wrapped(*data, mode="tensor"), wrapped.module(*data, mode="tensor"))
