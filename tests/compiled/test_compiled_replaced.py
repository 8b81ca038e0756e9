"""Test that if the loop replaces an object, a compiled step uses the new one, and that batches may contain objects."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from compiled_runs import (
    COMPILE,
    FALLS_BACK,
    Base,
    Case,
    Training,
    batches,
    check,
    check_plain,
    params_of,
    sgd,
)
from torch import nn

from slipstream import accelerate


class Masked(Base):
    def __init__(self):
        super().__init__()
        self.mask = torch.ones(8, dtype=torch.float64)

    def change(self, x):
        return x * self.mask


class Normed(Base):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8).double()

    def change(self, x):
        return self.norm(x)


class Sample:
    """The inputs of a batch in a class that is not registered as a pytree."""

    def __init__(self, x):
        self.x = x


class OfSamples(Base):
    def forward(self, sample):
        return super().forward(sample.x)


def masks():
    model, count = Masked(), iter(range(1, 99))

    def replace():
        model.mask = torch.full((8,), 1 + 0.1 * next(count), dtype=torch.float64)

    return Training(model, sgd(model), after=replace)


def moved():
    """Like `model.cpu(); model.cuda()`: parameters keep their identity, and buffers become new tensors."""
    model = Normed()
    return Training(model, sgd(model), before={6: lambda training: training.model.float().double()})


def samples():
    model = OfSamples()
    return Training(model, sgd(model), batches=[(Sample(x), y) for x, y in batches()])


def scalar_parameter(make):
    """Train a 0-dim parameter."""
    model = Base()
    model.factor = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    model.change = lambda x: x * model.factor
    return Training(model, make(model.parameters(), lr=0.01), batches=batches(14))


REPLACED = [
    Case("a tensor attribute that the loop replaces", masks, fast=True),
    Case("buffers that `.float().double()` replaces", moved, fast=True),
    Case("objects in the batch", samples, fast=True),
    Case(
        "a 0-dim float64 parameter",
        partial(scalar_parameter, torch.optim.Rprop),
        FALLS_BACK,
        "0-dim tensor",
    ),
]


@pytest.mark.parametrize("case", params_of(REPLACED, fast_only=True))
def test_eager_step_matches_a_plain_loop(case):
    check_plain(case)


@pytest.mark.parametrize("case", params_of(REPLACED))
def test_compiled_step_matches_a_plain_loop(case):
    check(case)


class Raises(Base):
    """A network that increments a buffer and then raises an error."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1, dtype=torch.float64))
        self.broken = False

    def change(self, x):
        self.calls += 1
        if self.broken:
            raise ValueError("the user's own")
        return x


@pytest.mark.parametrize("at", [2, 6])
def test_user_error_is_raised_once_and_does_not_disable_compilation(at):
    model = Raises()
    step = accelerate(model, sgd(model), F.mse_loss, speed=dict(compile=COMPILE))
    for count, batch in enumerate(batches(), 1):
        model.broken = count == at
        if model.broken:
            with pytest.raises(ValueError, match="the user's own"):
                step(batch)
        else:
            step(batch)
    assert float(model.calls) == len(batches())
    assert step.compiled_scope == "step"
