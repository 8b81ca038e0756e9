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
    assert_equal,
    batches,
    by_hand,
    by_step,
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


def class_weights():
    model, loss = Base(), nn.CrossEntropyLoss(weight=torch.ones(3, dtype=torch.float64))
    data = [(x, y.argmax(1)) for x, y in batches()]

    def replace():
        loss.weight = loss.weight * torch.tensor([1.0, 1.2, 0.9], dtype=torch.float64)

    return Training(model, sgd(model), loss, data, after=replace)


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


def other_groups():
    def replace(training):
        training.optimizer.param_groups = [dict(group) for group in training.optimizer.param_groups]

    def set_rate(training):
        training.optimizer.param_groups[0]["lr"] = 0.5

    model = Base()
    return Training(model, two_groups(model), before={6: replace, 7: set_rate})


def scalar_parameter(make):
    """Train a 0-dim parameter."""
    model = Base()
    model.factor = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    model.change = lambda x: x * model.factor
    return Training(model, make(model.parameters(), lr=0.01), batches=batches(14))


def methods(replace):
    """A method of the class is replaced after the fifth step and again after the ninth."""

    class Block(Base):
        def change(self, x):
            return x * self.factor

        @property
        def factor(self):
            return 1.5

    class Net(Block):
        pass

    model = Net()
    before = {6: lambda _: replace(Block, Net, 0.5), 10: lambda _: replace(Block, Net, 0.1)}
    return Training(model, sgd(model), before=before)


def replaced_forward(block, net, factor):
    block.forward = lambda self, x: factor * self.last(torch.tanh(self.first(x)))


def replaced_helper(block, net, factor):
    net.change = lambda self, x: x * factor  # override the base class's method


def replaced_property(block, net, factor):
    block.factor = property(lambda self: factor)


class LossBase(nn.Module):
    weight = 1.0

    def distance(self, scores, targets):
        return F.mse_loss(scores, targets)

    def forward(self, scores, targets):
        return self.weight * self.distance(scores, targets)


def loss_class(name, value):
    class Loss(LossBase):
        pass

    model = Base()
    return Training(model, sgd(model), Loss(), before={6: lambda _: setattr(Loss, name, value)})


def other_distance(self, scores, targets):
    return F.l1_loss(scores, targets)


def reloaded():
    """Like IPython's autoreload, which replaces the code of functions in place."""

    class Loss(LossBase):
        def distance(self, scores, targets):
            return F.mse_loss(scores, targets)

    def reload(_):
        Loss.distance.__code__ = other_distance.__code__

    model = Base()
    return Training(model, sgd(model), Loss(), before={6: reload})


class Scale:
    """A helper that is not a module."""

    factor = 1.5

    def __call__(self, x):
        return self.factor * self.change(x)

    def change(self, x):
        return x


def helper_class(name, value):
    class Helper(Scale):
        pass

    model = Base()
    model.change = Helper()
    return Training(model, sgd(model), before={6: lambda _: setattr(Helper, name, value)})


REPLACED = [
    Case(
        "a method overridden in the loss's class",
        partial(loss_class, "distance", other_distance),
        fast=True,
    ),
    Case("a number overridden in the loss's class", partial(loss_class, "weight", 0.3)),
    Case("the code of a loss method", reloaded),
    Case("a number in a helper object's class", partial(helper_class, "factor", 0.5), fast=True),
    Case("a method in a helper object's class", partial(helper_class, "change", lambda self, x: 3 * x)),
    Case("a forward method replaced in the class", partial(methods, replaced_forward), fast=True),
    Case("a method overridden in the class during training", partial(methods, replaced_helper)),
    Case("a property replaced in the class", partial(methods, replaced_property)),
    Case("a tensor attribute that the loop replaces", masks, fast=True),
    Case("class weights that the loop replaces", class_weights),
    Case("a network in the loss that the loop replaces", teacher),
    Case("buffers that `.float().double()` replaces", moved, fast=True),
    Case("NumPy arrays in the batch", numpy_targets),
    Case("objects in the batch", samples, fast=True),
    Case("tensor subclasses in the batch", subclasses, FALLS_BACK, "Subclass"),
    Case("parameters that move between groups", swapped),
    Case("parameter groups that are replaced", other_groups),
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


def test_traced_modules_match_plain_modules():
    seed()
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))).double()
    found, scope, _ = by_step(Training(model, sgd(model)), compile=COMPILE)
    seed()
    other = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    assert_equal(found, by_hand(Training(other, sgd(other))), TOLERANCE)
    assert scope == "step"
