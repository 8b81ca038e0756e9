"""`GraphUpdate` matches torch's optimizers."""

from functools import partial

import pytest
import torch
from graphs import Counting, batches, by_hand, in_graph
from torch import nn, optim

from slipstream.step.update import can_trace

KINDS = {
    "SGD": partial(optim.SGD, lr=0.05),
    "SGD with momentum": partial(optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "SGD with nesterov": partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "SGD that maximizes": partial(optim.SGD, lr=0.001, maximize=True),
    "fused SGD": partial(optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "Adam": partial(optim.Adam, lr=0.01),
    "Adam with amsgrad": partial(optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.01),
    "AdamW": partial(optim.AdamW, lr=0.01, weight_decay=0.1),
    "fused AdamW": partial(optim.AdamW, lr=0.01, fused=True),
    "foreach AdamW": partial(optim.AdamW, lr=0.01, foreach=True),
    "RMSprop": partial(optim.RMSprop, lr=0.001),
    "centered RMSprop": partial(optim.RMSprop, lr=0.001, centered=True, momentum=0.5),
    "Adagrad": partial(optim.Adagrad, lr=0.01, lr_decay=0.1),
    "NAdam": partial(optim.NAdam, lr=0.01),
    "RAdam": partial(optim.RAdam, lr=0.01),
    "Adadelta": partial(optim.Adadelta, lr=0.5),
    "Adamax": partial(optim.Adamax, lr=0.01),
    "ASGD": partial(optim.ASGD, lr=0.01),
}


def without_bias():
    """A network whose gradients are all nonzero, because adaptive optimizers amplify rounding errors near zero."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(96, 4))


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", KINDS)
def test_update_matches_the_optimizer(kind):
    make, data = KINDS[kind], batches()

    def falling(optimizer, number):
        for group in optimizer.param_groups:
            group["lr"] = make.keywords["lr"] / (1 + number)

    model, optimizer, losses = by_hand(make, data, falling, without_bias())
    own, wrapper, found = in_graph(make, data, falling, without_bias(), compiler := Counting())
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(own.state_dict(), model.state_dict(), rtol=1e-4, atol=1e-6)
    assert compiler.graphs == 1
    expected = optimizer.state_dict()["state"]
    for index, values in wrapper.optimizer.state_dict()["state"].items():
        assert values.keys() == expected[index].keys()


@pytest.mark.parametrize("kind", [optim.Adafactor, optim.Muon])
def test_unsupported_optimizers_step_outside_the_graph(kind):
    def matrices():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(108, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False)
        )

    def falling(optimizer, number):
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + number)

    make = partial(kind, lr=0.01)
    model, _, losses = by_hand(make, batches(), falling, matrices())
    own, wrapper, found = in_graph(make, batches(), falling, matrices(), compiler := Counting())
    assert not can_trace(wrapper.optimizer)
    torch.testing.assert_close(found, losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(own.state_dict(), model.state_dict(), rtol=1e-5, atol=1e-7)
    assert compiler.graphs == 1


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_momentum_can_change_without_a_new_graph(nesterov):
    def cycle(optimizer, number):
        optimizer.param_groups[0]["momentum"] = 0.9 - 0.05 * number

    make = partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=nesterov, weight_decay=0.01)
    model, _, losses = by_hand(make, batches(), cycle, without_bias())
    own, _, found = in_graph(make, batches(), cycle, without_bias(), compiler := Counting())
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(own.state_dict(), model.state_dict())
    assert compiler.graphs == 1


def test_groups_keep_their_own_settings():
    def groups(model):
        first, *others = model.parameters()
        return optim.SGD([{"params": [first], "lr": 0.2, "weight_decay": 0.1}, {"params": others}], lr=0.05)

    model, own = without_bias(), without_bias()
    by_hand(lambda _: groups(model), batches(), model=model)
    in_graph(lambda _: groups(own), batches(), model=own)
    torch.testing.assert_close(own.state_dict(), model.state_dict())
