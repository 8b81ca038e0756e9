"""Steps with NaN or infinity are skipped on the device, and the first module with a non-finite output is named."""

import math

import pytest
import torch
from torch import nn

from slipstream.errors import NonFiniteLossError
from slipstream.optim import OptimWrapper
from slipstream.speed.nan_guard import SkipNonFinite
from slipstream.step import EagerStep, sum_losses

pytorch_optimizer = pytest.importorskip("pytorch_optimizer")

NAN, INF = math.nan, math.inf


class Net(nn.Module):
    """A model with a scalar loss. An input with NaN makes the loss and the gradients NaN."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
        self.register_buffer("expanded", torch.ones(1).expand(6))

    def forward(self, x):
        return {"loss": self.body(x).square().mean()}


def good(index):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(index))


def bad(index=99):
    x = good(index)
    x[2, 1] = NAN
    return x


class InfiniteGradient(torch.autograd.Function):
    """The identity function with an infinite gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * INF


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True, amsgrad=True),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.2),
    "adamp": lambda p: pytorch_optimizer.AdamP(p, lr=0.1),  # stores its step count as a Python number
    "lamb": lambda p: pytorch_optimizer.Lamb(p, lr=0.1),
}


def train(batches, kind="sgd", guard=True, wrapper=OptimWrapper, forward=None, **options):
    """Train one step per batch. Return the model, the optimizer wrapper and the guard."""
    net = Net()
    optim = wrapper(optimizer=OPTIMIZERS[kind](net.parameters()), **options)
    skip = SkipNonFinite(net, torch.device("cpu"))
    optim.parts += [skip] if guard else []
    optim.initialize_count_status(net, 0, -1)
    step = EagerStep(lambda x: sum_losses((forward or Net.forward)(net, x)), net, optim)
    for x in batches:
        step(x)
    return net, optim, skip


def assert_same_run(one, other):
    (net, optim, _), (net2, optim2, _) = one, other
    for name, value in net2.state_dict().items():
        assert torch.equal(net.state_dict()[name], value), name
    state, state2 = optim.optimizer.state_dict()["state"], optim2.optimizer.state_dict()["state"]
    assert state.keys() == state2.keys()
    for number, values in state2.items():
        for name, value in values.items():
            assert torch.equal(torch.as_tensor(state[number][name]), torch.as_tensor(value)), (number, name)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_skipped_steps_do_not_change_weights_state_or_statistics(kind):
    guarded = train([bad(), good(1), good(2), bad(), bad(), good(3)], kind)
    assert_same_run(guarded, train([good(1), good(2), good(3)], kind, guard=False))
    assert guarded[2].read() == 3


def test_infinite_gradient_is_skipped():
    def forward(net, x):
        return {
            "loss": (InfiniteGradient.apply if x[0, 0] == 7 else nn.Identity())(net.body(x)).square().mean()
        }

    jumping = good(5)
    jumping[0, 0] = 7
    guarded = train([good(1), jumping, good(2)], forward=forward)
    assert_same_run(guarded, train([good(1), good(2)], guard=False))
    assert guarded[2].read() == 1


def test_bad_batch_skips_its_accumulation_window():
    batches = [good(1), good(2), good(3), bad(), bad(), good(4), good(5), good(6)]
    guarded = train(batches, accumulative_counts=2)
    assert_same_run(guarded, train([good(1), good(2), good(5), good(6)], guard=False, accumulative_counts=2))
    assert guarded[2].read() == 2


def test_too_many_consecutive_skips_stop_the_run():
    _, _, guard = train([bad()] * 3 + [good(1)] + [bad()] * 2)
    guard.max_skipped = 2
    assert guard.read() == 5  # two consecutive skips are within the limit
    _, _, guard = train([good(1)] + [bad()] * 3)
    guard.max_skipped = 2
    with pytest.raises(NonFiniteLossError, match=r"the last 3 steps were skipped.*max_skipped"):
        guard.read()
