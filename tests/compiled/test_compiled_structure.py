"""Tests of changes that Dynamo's guards do not detect: batch structure, branches and optimizer steps."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from compiled_runs import (
    COMPILE,
    FALLS_BACK,
    TOLERANCE,
    Base,
    Case,
    Training,
    batches,
    check,
    check_plain,
    params_of,
    seed,
    sgd,
)
from torch import nn

from slipstream import accelerate


class OfDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.p, self.q = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()

    def forward(self, batch):
        return self.p(batch["p"]) + torch.tanh(self.q(batch["q"]))


def dict_order():
    model, data = OfDict(), batches()
    inputs = [
        {"p": x, "q": x.flip(0)} if number < 7 else {"q": x.flip(0), "p": x}
        for number, (x, _) in enumerate(data)
    ]
    return Training(model, sgd(model), batches=[(i, y) for i, (_, y) in zip(inputs, data, strict=True)])


def unused_list():
    model, data = OfDict(), batches()
    inputs = [
        {"names": ["a"] * (1 + number % 3), "p": x, "q": x.flip(0)} for number, (x, _) in enumerate(data)
    ]
    return Training(model, sgd(model), batches=[(i, y) for i, (_, y) in zip(inputs, data, strict=True)])


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = (nn.Linear(n, m).double() for n, m in ((4, 8), (8, 3), (8, 3)))

    def forward(self, x, task):
        hidden = torch.tanh(self.body(x))
        return self.a(hidden) + self.b(hidden) if task == "b" else self.a(hidden)


def branch(tasks):
    def make():
        model = TwoHeads()
        data = [(x, task, y) for (x, y), task in zip(batches(), tasks, strict=True)]
        return Training(model, sgd(model, momentum=0), batches=data)

    return make


def momentum_changes(values, **options):
    def make():
        model = Base()
        optimizer = sgd(model, **options)

        def set_momentum(value, _):
            optimizer.param_groups[0]["momentum"] = value

        before = {number: functools.partial(set_momentum, value) for number, value in values.items()}
        return Training(model, optimizer, before=before)

    return make


def self_distillation():
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    fixed = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)

    def loss(output, targets):
        with torch.no_grad():
            other = model(fixed)
        return F.mse_loss(output, targets) + 0.1 * F.mse_loss(output, other)

    return Training(model, sgd(model), loss)


CASES = [
    Case("dict keys in a different order", dict_order, fast=True),
    Case("an unused list in the batch whose length changes", unused_list, fast=True),
    Case(
        "a second head that is used from the middle of an accumulation window onwards",
        branch("aaaaabbbbbbb"),
        speed={"accumulate": 2},
        fast=True,
    ),
    Case(
        "a second head in the first batch of each window",
        branch("aaaaaabababa"),
        FALLS_BACK,
        "receive gradients",
        speed={"accumulate": 2},
        fast=True,
    ),
    Case("momentum set to 0 and back", momentum_changes({6: 0.0, 9: 0.9}), fast=True),
    Case("a loss that calls the model without gradients", self_distillation, fast=True),
]


@pytest.mark.parametrize("case", params_of(CASES))
def test_compiled_step_matches_a_plain_loop(case):
    check(case)


@pytest.mark.parametrize("case", params_of(CASES, fast_only=True))
def test_eager_step_matches_a_plain_loop(case):
    check_plain(case)


@pytest.mark.parametrize("compile", [None, COMPILE])
def test_input_that_requires_a_gradient_receives_one(compile):
    seed()
    model = Base()
    step = accelerate(model, sgd(model), F.mse_loss, speed=dict(compile=compile) if compile else {})
    for x, y in batches():
        x.requires_grad_()
        other = copy.deepcopy(model)
        step((x, y))
        given = x.detach().clone().requires_grad_()
        F.mse_loss(other(given), y).backward()
        torch.testing.assert_close(x.grad, given.grad, **TOLERANCE)
    step.close()
