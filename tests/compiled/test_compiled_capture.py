"""Test code that torch may not capture in a graph: results do not change, and warnings name the user's line."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compiled_runs import (
    COMPILE,
    FALLS_BACK,
    STEPS,
    TOLERANCE,
    Base,
    Case,
    Training,
    batches,
    check,
    check_plain,
    compiled_scope,
    params_of,
    seed,
    sgd,
    warnings_of_slipstream,
)
from torch import nn

from slipstream import accelerate

HERE = Path(__file__).name


def of(module, loss=F.mse_loss):
    """Return a function that builds a run with this network class. The run also compares `calls` at the end."""

    def make():
        model = module()
        return Training(model, sgd(model), loss, observe=lambda: getattr(model, "calls", None))

    return make


class Routed(Base):
    """A network that routes rows to one of two experts. An expert without rows is not called."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8).double() for _ in range(2))

    def change(self, x):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero((x.sum(1) > 0).long() == number)[:, 0]
            if len(rows):
                out = out.index_copy(0, rows, expert(x[rows]))
        return out


class Branches(Base):
    """A network that branches on a tensor value."""

    def change(self, x):
        return x * 0.5 if x.sum() > 0 else x


class Queue(Base):
    """A network with a ring buffer of past activations. The write position is a second buffer, read as an int."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.zeros(4, 8, dtype=torch.float64))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

    def change(self, x):
        ptr = int(self.ptr)
        self.queue[ptr] = x.detach().mean(0)
        self.ptr[0] = (ptr + 1) % 4
        return x - self.queue.mean(0)


class Overlapping(Base):
    """A network with two buffers that are views of the same tensor."""

    def __init__(self):
        super().__init__()
        both = torch.zeros(9, dtype=torch.float64)
        self.register_buffer("early", both[:8])
        self.register_buffer("late", both[1:])

    def change(self, x):
        self.early.add_(0.1 * x.detach().mean(0))
        return x - self.late


class Lazy(nn.Module):
    """A network with a lazy layer, which infers its input size from the first batch."""

    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(8, 3).double(), nn.LazyLinear(8, dtype=torch.float64)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


class Item(Base):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def change(self, x):
        self.calls += 1
        return x / (1 + abs(x.detach().mean().item()))


class Prints(Item):
    def change(self, x):
        self.calls += 1
        print("mean", float(x.detach().mean()))
        return x


class CallsNumpy(Item):
    def change(self, x):
        self.calls += 1
        return x - torch.from_numpy(np.sort(x.detach().numpy(), axis=0)[0])


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 0.5 + 0.01 * x


class _ByNumpy(torch.autograd.Function):
    """A function that computes its forward and backward passes in NumPy."""

    @staticmethod
    def forward(ctx, x):
        ctx.sign = np.sign(x.detach().tolist())
        return x.abs()

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.tensor(ctx.sign.tolist(), dtype=grad.dtype)


class OwnFunction(Base):
    def change(self, x):
        return _Halved.apply(x)


class OwnByNumpy(Base):
    def change(self, x):
        return _ByNumpy.apply(x)


def item_in_loss(scores, targets):
    return F.mse_loss(scores, targets) / (1 + targets.abs().max().item())


CAPTURE = [
    Case("routing with `nonzero()` and `if len(rows)`", of(Routed), FALLS_BACK, line=HERE, fast=True),
    Case("a branch on a value", of(Branches), FALLS_BACK, line=HERE),
    Case("`int()` of a buffer as an index", of(Queue), fast=True),
    Case("buffers that share memory", of(Overlapping)),
    Case("an uninitialized `LazyLinear`", of(Lazy)),
    Case("`.item()` in forward", of(Item), fast=True),
    Case("`.item()` in the loss", of(Base, item_in_loss)),
    Case("`print()` of a value", of(Prints), FALLS_BACK, line=HERE),
    Case("NumPy on detached tensors", of(CallsNumpy)),
    Case("an `autograd.Function`", of(OwnFunction), fast=True),
    Case("an `autograd.Function` implemented in NumPy", of(OwnByNumpy), FALLS_BACK, line=HERE),
]
CASES = CAPTURE
GROUPS = {"Code that torch may not capture": CAPTURE}


@pytest.mark.parametrize("case", params_of(CASES, fast_only=True))
def test_eager_step_matches_a_plain_loop(case):
    check_plain(case)


@pytest.mark.parametrize("case", params_of(CASES))
def test_compiled_step_matches_a_plain_loop(case):
    check(case)


# ---- errors in forward ------------------------------------------------------------------------------------


class BadBatchError(ValueError):
    """A user-defined exception."""


class ByShape(Base):
    """A network that raises an error for batches with fewer than three rows."""

    def forward(self, x):
        if x.shape[0] < 3:
            raise BadBatchError(f"{x.shape[0]} rows")
        return super().forward(x)


class ByValue(Base):
    """A network that raises an error for non-finite values."""

    def forward(self, x):
        if not torch.isfinite(x).all():
            raise BadBatchError("not finite")
        return super().forward(x)


class ByLoss(Base):
    """A network whose loss raises an error for targets above 50."""

    @staticmethod
    def loss(scores, targets):
        if float(targets.max()) > 50:
            raise BadBatchError("a target above 50")
        return F.mse_loss(scores, targets)


def _bad(kind, x, y):
    if kind is ByShape:
        return x[:2], y[:2]
    return (x * torch.inf, y) if kind is ByValue else (x, y + 100)


def _train_on(step, data):
    """Train with a loop that skips invalid batches. Return the losses and the error messages."""
    losses, errors = [], []
    for batch in data:
        try:
            losses.append(step(batch))
        except BadBatchError as error:
            errors.append(str(error))
    return torch.stack(losses), errors


def _own_step(model, loss_fn, optimizer):
    def step(batch):
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().clone()

    return step


@pytest.mark.parametrize("at", [1, 5])
@pytest.mark.parametrize("kind", [ByShape, ByValue, ByLoss])
@pytest.mark.parametrize("speed", [{}, dict(compile=COMPILE)], ids=["eager", "compiled"])
def test_user_exception_is_raised_and_training_continues(kind, at, speed):
    data = batches(STEPS)
    data[at - 1] = _bad(kind, *data[at - 1])
    found = []
    for by_hand in (True, False):
        seed()
        model = kind()
        optimizer, loss_fn = sgd(model), getattr(model, "loss", F.mse_loss)
        if by_hand:
            losses, errors = _train_on(_own_step(model, loss_fn, optimizer), data)
        else:
            with warnings_of_slipstream() as said:
                step = accelerate(model, optimizer, loss_fn, speed=speed)
                losses, errors = _train_on(lambda batch, step=step: step(batch)["loss"].clone(), data)
            assert not [line for line in said if "compiler bug" in line]
        found.append((losses, errors, model.state_dict()))
    assert len(found[0][1]) == 1
    assert found[1][1] == found[0][1]
    torch.testing.assert_close(found[1][::2], found[0][::2], **TOLERANCE)


def test_user_error_in_step_1_does_not_disable_the_compiled_step():
    data = batches(STEPS)
    data[0] = _bad(ByShape, *data[0])
    model = ByShape()
    step = accelerate(model, sgd(model), F.mse_loss, speed=dict(compile=COMPILE))
    _train_on(lambda batch: step(batch)["loss"], data)
    assert compiled_scope(step) == "step"
