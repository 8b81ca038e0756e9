"""Test that if the loop replaces an object, a compiled step uses the new one, and that batches may contain objects."""

import copy
from functools import partial

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
    by_hand,
    check,
    check_plain,
    params_of,
    seed,
    sgd,
)
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

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


class Subclass(torch.Tensor):
    pass


def masks():
    model, count = Masked(), iter(range(1, 99))

    def replace():
        model.mask = torch.full((8,), 1 + 0.1 * next(count), dtype=torch.float64)

    return Training(model, sgd(model), after=replace)


def teacher():
    model = Base()
    teachers = [copy.deepcopy(model).requires_grad_(False)]

    def loss(scores, targets):
        return F.mse_loss(scores, targets) + F.mse_loss(
            scores, teachers[0](targets @ torch.ones(3, 4).double())
        )

    def replace(training):
        teachers[0] = copy.deepcopy(training.model).requires_grad_(False)

    return Training(model, sgd(model), loss, before={6: replace})


def moved():
    """Like `model.cpu(); model.cuda()`: parameters keep their identity, and buffers become new tensors."""
    model = Normed()
    return Training(model, sgd(model), before={6: lambda training: training.model.float().double()})


def numpy_targets():
    model = Base()

    def loss(scores, targets):
        return F.mse_loss(scores, torch.as_tensor(targets))

    return Training(model, sgd(model), loss, [(x, y.numpy()) for x, y in batches()])


def samples():
    model = OfSamples()
    return Training(model, sgd(model), batches=[(Sample(x), y) for x, y in batches()])


def subclasses():
    model = Base()
    return Training(model, sgd(model), batches=[(x.as_subclass(Subclass), y) for x, y in batches()])


def two_groups(model):
    params = list(model.parameters())
    return torch.optim.SGD([dict(params=params[:2], lr=0.1), dict(params=params[2:], lr=0.01)])


def swapped():
    def swap(training):
        one, other = training.optimizer.param_groups
        one["params"], other["params"] = other["params"], one["params"]

    model = Base()
    return Training(model, two_groups(model), before={6: swap})


def scalar_parameter(make):
    """Train a 0-dim parameter."""
    model = Base()
    model.factor = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    model.change = lambda x: x * model.factor
    return Training(model, make(model.parameters(), lr=0.01), batches=batches(14))


REPLACED = [
    Case("a tensor attribute that the loop replaces", masks, fast=True),
    Case("a network in the loss that the loop replaces", teacher),
    Case("buffers that `.float().double()` replaces", moved, fast=True),
    Case("NumPy arrays in the batch", numpy_targets),
    Case("objects in the batch", samples, fast=True),
    Case("tensor subclasses in the batch", subclasses, FALLS_BACK, "Subclass"),
    Case("parameters that move between groups", swapped),
    Case(
        "a 0-dim float64 parameter",
        partial(scalar_parameter, torch.optim.Rprop),
        FALLS_BACK,
        "0-dim tensor",
    ),
]
GROUPS = {"Objects replaced between steps, and unusual inputs": REPLACED}


@pytest.mark.parametrize("case", params_of(REPLACED, fast_only=True))
def test_eager_step_matches_a_plain_loop(case):
    check_plain(case)


@pytest.mark.parametrize("case", params_of(REPLACED))
def test_compiled_step_matches_a_plain_loop(case):
    check(case)


@pytest.mark.parametrize("at", [2, 5])
def test_model_trains_once_on_the_batch_if_dynamo_skips_the_step(at):
    """Under a `TorchDispatchMode`, torch.compile runs the function eagerly and then raises an error."""
    model = Base()
    step = accelerate(model, sgd(model), F.mse_loss, speed=dict(compile=COMPILE))
    seed(1)
    losses = []
    for count, batch in enumerate(batches(), 1):
        if count == at:
            with FlopCounterMode(display=False):
                losses.append(step(batch)["loss"].clone())
        else:
            losses.append(step(batch)["loss"].clone())
    seed()
    other = Base()
    expected = by_hand(Training(other, sgd(other)))
    torch.testing.assert_close(torch.stack(losses), expected["losses"], **TOLERANCE)
    torch.testing.assert_close(model.state_dict(), expected["state"], **TOLERANCE)


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


def test_label_out_of_range_raises_an_error_and_keeps_the_random_state():
    data = [(x, y.argmax(1)) for x, y in batches()]
    data[6] = (data[6][0], data[6][1] + 100)

    def train(step):
        seed(1)
        losses = []
        for batch in data:
            try:
                losses.append(step(batch).clone())
            except IndexError:
                losses.append(torch.zeros((), dtype=torch.float64))
        return torch.stack(losses)

    def dropping():
        seed()
        model = Base()
        model.change = lambda x: F.dropout(x, 0.5)
        return model, sgd(model)

    model, optimizer = dropping()
    step = accelerate(model, optimizer, F.cross_entropy, speed=dict(compile=COMPILE))
    found = train(lambda batch: step(batch)["loss"])
    model, optimizer = dropping()

    def plain(batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    torch.testing.assert_close(found, train(plain), **TOLERANCE)
    assert step.compiled_scope == "step"
