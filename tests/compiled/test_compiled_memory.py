"""Tests of Python state between steps: attributes, lists, counters, hidden states and random number generators."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compiled_runs import (
    COMPILE,
    FALLS_BACK,
    Base,
    Case,
    Training,
    by_hand,
    by_step,
    check,
    check_plain,
    params_of,
    seed,
    sgd,
)
from torch import nn

HERE = Path(__file__).name


def of(module, *observed, loss=F.mse_loss):
    """Return a function that builds a run with this network class. The run compares these attributes at the end."""

    def make():
        model = module()
        return Training(model, sgd(model), loss, observe=lambda: [getattr(model, name) for name in observed])

    return make


class PlainTensor(Base):
    """A running mean as a plain attribute that forward assigns."""

    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(8, dtype=torch.float64)

    def change(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class PlainInPlace(PlainTensor):
    def change(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.mean


class Growing(Base):
    """A network that appends the mean of each step to a list and reads the list."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def change(self, x):
        self.seen.append(x.detach().mean(0))
        return x - torch.stack(self.seen).mean(0)


class Counter(Base):
    """An int that is incremented and used."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def change(self, x):
        self.calls += 1
        return x / self.calls


class Unused(Base):
    """An int that is incremented but not used."""

    def __init__(self):
        super().__init__()
        self.calls, self.time = 0, 0.0

    def change(self, x):
        self.calls, self.time = self.calls + 1, self.time + 0.25
        return x


ATTRIBUTES = [
    Case("a tensor attribute that forward assigns", of(PlainTensor, "mean"), fast=True),
    Case("a tensor attribute that forward changes in place", of(PlainInPlace, "mean")),
    Case("a list of tensors that grows", of(Growing, "seen"), FALLS_BACK, "seen|list|Growing"),
    Case("an int that forward increments and uses", of(Counter, "calls"), fast=True),
    Case(
        "an int and a float that forward increments but does not use",
        of(Unused, "calls", "time"),
        FALLS_BACK,
        "a new graph",
    ),
]


# ---- truncated backpropagation through time ---------------------------------------------------------------


class Recurrent(nn.Module):
    """A network that keeps its hidden state between steps."""

    def __init__(self, attached=False):
        super().__init__()
        self.cell, self.last = nn.GRUCell(4, 8).double(), nn.Linear(8, 3).double()
        self.hidden, self.attached = torch.zeros(6, 8, dtype=torch.float64), attached

    def forward(self, x):
        hidden = self.cell(x, self.hidden)
        self.hidden = hidden if self.attached else hidden.detach()
        return self.last(hidden)


class DetachedByUser(Recurrent):
    """The loop detaches the hidden state between steps."""

    def __init__(self):
        super().__init__(attached=True)


def detached_between():
    model = DetachedByUser()

    def detach():
        model.hidden = model.hidden.detach()

    return Training(model, sgd(model), after=detach, observe=lambda: model.hidden)


TBPTT = [
    Case("a hidden state that is detached", of(Recurrent, "hidden"), fast=True),
    Case("a hidden state that the loop detaches", detached_between, FALLS_BACK, "requires grad"),
]


@pytest.mark.parametrize("speed", [{}, dict(compile=COMPILE)], ids=["eager", "compiled"])
def test_hidden_state_that_is_not_detached_raises_an_error(speed):
    """In step 2, torch raises an error because step 1's graph was freed. `accelerate` must raise the same error."""

    def make():
        seed()
        model = Recurrent(attached=True)
        return Training(model, sgd(model))

    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        by_hand(make())
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        by_step(make(), **speed)


# ---- random numbers ---------------------------------------------------------------------------------------


class OwnGenerator(Base):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def change(self, x):
        return x * torch.rand(x.shape, generator=self.generator, dtype=x.dtype)


class GlobalNumpy(Base):
    def change(self, x):
        return x * np.random.uniform(0.5, 1.5)


class GlobalPython(Base):
    def change(self, x):
        return x * random.uniform(0.5, 1.5)


class GlobalTorch(Base):
    def change(self, x):
        return F.dropout(x, 0.3) + 0.1 * torch.randn_like(x)


def next_numbers():
    """Return the next number of each global generator. The numbers after training must match a plain loop."""
    return [float(np.random.rand()), random.random(), float(torch.rand((), dtype=torch.float64))]


def drawing(module, loss=F.mse_loss):
    def make():
        model = module()
        return Training(model, sgd(model), loss, observe=next_numbers)

    return make


RANDOM = [
    Case("dropout and `torch.randn_like`", drawing(GlobalTorch), fast=True),
    Case("a `torch.Generator` in forward", drawing(OwnGenerator), FALLS_BACK, "Generator", HERE, fast=True),
    Case("`np.random` in forward", drawing(GlobalNumpy), FALLS_BACK, "numpy|np.random", HERE, fast=True),
    Case("Python's `random` in forward", drawing(GlobalPython), FALLS_BACK, "random"),
]

CASES = [*ATTRIBUTES, *TBPTT, *RANDOM]


@pytest.mark.parametrize("case", params_of(CASES, fast_only=True))
def test_eager_step_matches_a_plain_loop(case):
    check_plain(case)


@pytest.mark.parametrize("case", params_of(CASES))
def test_compiled_step_matches_a_plain_loop(case):
    check(case)
