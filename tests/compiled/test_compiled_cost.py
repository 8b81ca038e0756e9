"""Tests of the cost of a compiled step: graphs for settings that change at each step, and memory that is released."""

import gc
import weakref
from functools import partial

import pytest
import torch.nn.functional as F
from compiled_runs import (
    FALLS_BACK,
    STEPS,
    Base,
    Case,
    Training,
    assert_equal,
    batches,
    by_hand,
    by_step,
    check_plain,
    net,
    params_of,
    seed,
    sgd,
)
from torch import nn, optim
from torch._dynamo.backends.debugging import aot_eager
from torch.optim import lr_scheduler

from slipstream import accelerate

MOST_GRAPHS = 4
"""One graph, a second graph when a number first changes, and two more graphs as a margin."""


class Counting:
    """A compiler that counts graphs and their runs."""

    def __init__(self):
        self.graphs = self.runs = 0
        self.made = []

    def __call__(self, graph, inputs):
        self.graphs += 1
        compiled = aot_eager(graph, inputs)

        def run(*args):
            self.runs += 1
            return compiled(*args)

        self.made.append(weakref.ref(run))
        return run


# ---- settings that change at each step --------------------------------------------------------------------


def one_cycle(kind, **options):
    model = net()
    optimizer = kind(model.parameters(), lr=0.01, **options)
    schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=STEPS + 2)
    return Training(model, optimizer, after=schedule.step)


def scheduled(name, change, kind, **options):
    """Return a training run with an optimizer setting that changes after each step."""
    model = net()
    optimizer = kind(model.parameters(), **options)
    group = optimizer.param_groups[0]
    return Training(model, optimizer, after=lambda: group.update({name: change(group[name])}))


class Dropping(Base):
    """Dropout whose rate changes between steps."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def change(self, x):
        return self.drop(x)


def dropout_rates():
    model = Dropping()

    def more():
        model.drop.p += 0.03

    return Training(model, sgd(model), after=more)


class Counted(Base):
    """A float that forward increments and uses as a divisor."""

    def __init__(self):
        super().__init__()
        self.time = 0.0

    def change(self, x):
        self.time += 0.25
        return x / (1 + self.time)


class Warmed(Base):
    """A float attribute that the loop sets before each step."""

    share = 0.1

    def change(self, x):
        return x * self.share


def counted():
    model = Counted()
    return Training(model, sgd(model), observe=lambda: model.time)


def set_in_loop():
    model = Warmed()

    def warm():
        model.share += 0.07

    return Training(model, sgd(model), after=warm)


class Weighted:
    """A loss whose weight decreases at each step."""

    weight = 1.0

    def __call__(self, scores, targets):
        return self.weight * F.mse_loss(scores, targets)


_LESS = lambda value: value * 0.9  # noqa: E731
SCHEDULES = [
    Case("OneCycleLR with Adam", partial(one_cycle, optim.Adam), fast=True),
    Case(
        "weight decay of SGD", partial(scheduled, "weight_decay", _LESS, optim.SGD, lr=0.05, weight_decay=0.1)
    ),
    Case("a dropout rate", dropout_rates, FALLS_BACK, "a new graph"),
    Case("a float that forward increments", counted, FALLS_BACK, "a new graph", fast=True),
    Case("a float attribute of the model that the loop sets", set_in_loop),
]


@pytest.mark.parametrize("case", params_of(SCHEDULES, fast_only=True))
def test_eager_step_matches_a_plain_loop(case):
    check_plain(case)


@pytest.mark.parametrize("case", params_of(SCHEDULES))
def test_setting_that_changes_at_each_step_needs_few_graphs(case):
    seed()
    expected = by_hand(case.make())
    seed()
    counting = Counting()
    found, scope, warnings = by_step(case.make(), compile=dict(backend=counting, cache=False))
    assert_equal(found, expected, case.tolerance)
    assert counting.graphs <= MOST_GRAPHS, f"{counting.graphs} graphs"
    if case.expect == FALLS_BACK:
        assert scope is None, warnings
        assert len(warnings) == 1
        assert case.cause in warnings[0]
        return
    assert scope == "step", warnings
    assert warnings == []
    assert counting.runs >= STEPS - MOST_GRAPHS, f"graphs ran in only {counting.runs} of {STEPS} steps"


# ---- memory -----------------------------------------------------------------------------------------------


def _train(model=None, close=True, steps=3, **speed):
    """Train, close the step unless `close=False`, and return weak references to its objects and compiled code."""
    model = net() if model is None else model
    optimizer, loss, counting = optim.AdamW(model.parameters()), Weighted(), Counting()
    step = accelerate(
        model, optimizer, loss, speed=dict(compile=dict(backend=counting, cache=False), **speed)
    )
    for batch in batches(steps):
        step(batch)
    assert counting.made
    if close:
        step.close()
    weight = next(model.parameters())
    parts = {"optimizer": optimizer, "loss": loss, "step": step, "model": model}
    tensors = {"weight": weight, "moment": optimizer.state[weight]["exp_avg"]}
    gone = {name: weakref.ref(part) for name, part in (parts | tensors).items()}
    return {**gone, **{f"compiled code {i}": ref for i, ref in enumerate(counting.made)}}


def _alive(gone, code=False):
    gc.collect()
    return sorted(
        name for name, ref in gone.items() if ref() is not None and name.startswith("compiled") == code
    )


def test_closed_step_is_released():
    assert _alive(_train()) == []


def test_closed_step_releases_compiled_code():
    """PyTorch keeps a compiled function's code until torch._dynamo.reset() or reset_code() is called."""
    assert _alive(_train(), code=True) == []
