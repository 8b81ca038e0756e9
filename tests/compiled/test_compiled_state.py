"""Tests of state that a step changes in addition to parameters: optimizer states, buffers, batches and losses."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from compiled_runs import (
    EMA,
    FALLS_BACK,
    Base,
    Case,
    Training,
    batches,
    check,
    check_plain,
    net,
    params_of,
    sgd,
)
from torch import nn

pytorch_optimizer = pytest.importorskip("pytorch_optimizer")

LIBRARY = {
    "SOAP": dict(lr=1e-2, precondition_frequency=2),
    "Ranger21": dict(lr=1e-2, num_iterations=12),
    "ScheduleFreeAdamW": dict(lr=1e-2),
    "Prodigy": {},
    "Kron": dict(lr=1e-2),
}
"""Optimizers that count steps in their groups or attributes, with options for a tiny network."""


def from_library(name):
    model = net()
    optimizer = getattr(pytorch_optimizer, name)(model.parameters(), **LIBRARY[name])
    if hasattr(optimizer, "train"):  # schedule-free optimizers
        optimizer.train()
    return Training(model, optimizer, observe=lambda: optimizer.param_groups[0].get("step"))


def lookahead():
    model = net()
    optimizer = pytorch_optimizer.Lookahead(sgd(model), k=3)
    return Training(model, optimizer, observe=lambda: [g["counter"] for g in optimizer.param_groups])


class CountingSGD(torch.optim.SGD):
    """An optimizer whose learning rate depends on an attribute that counts its steps."""

    done = 0

    def step(self, closure=None):
        self.done += 1
        for group in self.param_groups:
            group["lr"] = 0.05 / self.done
        return super().step(closure)


def counting_optimizer():
    model = net()
    optimizer = CountingSGD(model.parameters(), lr=0.05)
    return Training(model, optimizer, observe=lambda: optimizer.done)


OPTIMIZERS = [
    *(Case(name, partial(from_library, name), fast=name == "SOAP") for name in LIBRARY),
    Case("Lookahead around SGD", lookahead),
    Case("a custom optimizer that counts its steps in an attribute", counting_optimizer, fast=True),
]


# ---- buffers ----------------------------------------------------------------------------------------------


class Buffered(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))


class Assigned(Buffered):
    def change(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class AssignedLate(Buffered):
    """A network that reads a buffer before assigning it, and assigns an integer buffer."""

    def change(self, x):
        x = x * (1 + self.mean)
        self.mean, self.seen = x.detach().mean(0), self.seen + 1
        return x / (1 + self.seen)


class AssignedInChild(Base):
    """A network that assigns a buffer of its child module."""

    def __init__(self):
        super().__init__()
        self.child = Buffered()

    def change(self, x):
        self.child.mean = self.child.mean.lerp(x.detach().mean(0), 0.1)
        return x - self.child.mean


class DataAssigned(Buffered):
    def change(self, x):
        self.mean.data = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class InPlace(Buffered):
    def change(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        self.seen += 1
        return x - self.mean


def of(module, loss=F.mse_loss):
    """Return a function that builds a run with this network class and SGD."""

    def make():
        model = module()
        return Training(model, sgd(model), loss)

    return make


_BUFFERS = {
    "a buffer that forward assigns": Assigned,
    "buffers that forward reads and then assigns": AssignedLate,
    "a buffer that a parent module assigns": AssignedInChild,
    "a buffer whose `.data` forward assigns": DataAssigned,
    "a buffer that forward changes in place": InPlace,
}
BUFFERS = [Case(what, of(module), fast=module is Assigned) for what, module in _BUFFERS.items()]
AVERAGED = [
    Case(
        f"{what}, with EMA",
        of(module),
        speed=dict(ema=EMA),
        fast=module is Assigned,
    )
    for what, module in _BUFFERS.items()
    if module in (Assigned, InPlace)
]


# ---- batches ----------------------------------------------------------------------------------------------


class ScalesInput(Base):
    def forward(self, x):
        return super().forward(x.mul_(0.9))


class WritesInput(Base):
    """A network that writes into a part of the input after using it."""

    def forward(self, x):
        out = super().forward(x.clone())
        x[:, 0] = out.detach()[:, 0]
        return out


def shrinks_targets(scores, targets):
    return F.mse_loss(scores, targets.mul_(0.9))


def marks_in_dict(scores, targets):
    targets["seen"] += 1
    return F.mse_loss(scores, targets["values"] / targets["seen"])


def batches_again(module=Base, loss=F.mse_loss, wrap=lambda y: y):
    """Train three epochs on the same four batches, which the step changes in place."""
    model = module()
    data = [(x, wrap(y)) for x, y in batches(4)]
    return Training(model, sgd(model), loss, data * 3, observe=lambda: data)


def with_count(y):
    return {"values": y, "seen": torch.zeros((), dtype=torch.float64)}


BATCHES = [
    Case("inputs that the model scales in place", partial(batches_again, ScalesInput), fast=True),
    Case("inputs into which the model writes", partial(batches_again, WritesInput)),
    Case("targets that the loss changes in place", partial(batches_again, loss=shrinks_targets)),
    Case("a counter in the batch", partial(batches_again, loss=marks_in_dict, wrap=with_count)),
]


# ---- losses -----------------------------------------------------------------------------------------------


class BufferedLoss(nn.Module):
    """A loss that divides by a running mean of the loss in a buffer."""

    def __init__(self, assign, shape=()):
        super().__init__()
        self.assign = assign
        self.register_buffer("running", torch.ones(shape, dtype=torch.float64))

    def forward(self, scores, targets):
        loss = F.mse_loss(scores, targets)
        if self.assign:
            self.running = 0.9 * self.running + 0.1 * loss.detach()
        else:
            self.running.lerp_(loss.detach(), 0.1)
        return (loss / self.running).sum()


class RunningLoss:
    """A loss that divides by a running mean of the loss in a plain object."""

    def __init__(self, shape=()):
        self.running, self.calls = torch.ones(shape, dtype=torch.float64), 0

    def __call__(self, scores, targets):
        loss = F.mse_loss(scores, targets)
        self.running = 0.9 * self.running + 0.1 * loss.detach()
        self.calls += 1
        return (loss / self.running).sum()


class Teacher:
    """A loss that contains another network. Each call updates the BatchNorm statistics of that network."""

    def __init__(self, follows=False):
        self.model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, 1)).double()
        self.model.requires_grad_(False).train()
        self.follows = follows

    def __call__(self, scores, targets):
        if self.follows:
            with torch.no_grad():
                self.model[0].weight.mul_(0.99).add_(0.01 * scores.mean())
        return F.mse_loss(scores, targets) + self.model(scores).square().mean()


def with_loss(make):
    model, loss = net(), make()

    def state():
        if isinstance(loss, Teacher):
            return loss.model.state_dict()
        return loss.running if isinstance(loss, nn.Module) else [loss.running, loss.calls]

    return Training(model, sgd(model), loss, observe=state)


LOSSES = [
    Case(
        "a loss module whose 0-dim float64 buffer changes in place",
        partial(with_loss, partial(BufferedLoss, False)),
        FALLS_BACK,
        "compute different results",
    ),
    Case(
        "a loss module whose buffer changes in place", partial(with_loss, partial(BufferedLoss, False, (1,)))
    ),
    Case("a loss object with a running tensor", partial(with_loss, RunningLoss), fast=True),
    Case("a network with BatchNorm in the loss", partial(with_loss, Teacher), fast=True),
]

CASES = [*OPTIMIZERS, *BUFFERS, *AVERAGED, *BATCHES, *LOSSES]


@pytest.mark.parametrize("case", params_of(CASES, fast_only=True))
def test_eager_step_matches_a_plain_loop(case):
    check_plain(case)


@pytest.mark.parametrize("case", params_of(CASES))
def test_compiled_step_matches_a_plain_loop(case):
    check(case)
