"""Test code that torch may not capture in a graph: results do not change, and warnings name the user's line."""

import warnings
from pathlib import Path

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
    by_hand,
    check,
    check_plain,
    params_of,
    seed,
    sgd,
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


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 0.5 + 0.01 * x


class OwnFunction(Base):
    def change(self, x):
        return _Halved.apply(x)


class UnusedFeatures(Base):
    """A network with dropout that also computes features that nothing uses, and warns."""

    def change(self, x):
        warnings.warn("deprecated", FutureWarning, stacklevel=1)
        x = F.dropout(x, 0.3)
        x.unflatten(1, (2, 4)).transpose(1, 2).contiguous()
        return x * (1 + torch.rand_like(x).div_(2))


CAPTURE = [
    Case("routing with `nonzero()` and `if len(rows)`", of(Routed), FALLS_BACK, line=HERE, fast=True),
    Case("a branch on a value", of(Branches), FALLS_BACK, line=HERE),
    Case("`int()` of a buffer as an index", of(Queue), fast=True),
    Case("`.item()` in forward", of(Item), fast=True),
    Case("`print()` of a value", of(Prints), FALLS_BACK, line=HERE),
    Case(
        "unused features after dropout, and a warning",
        of(UnusedFeatures),
        *([] if torch.__version__ >= "2.12" else [FALLS_BACK]),  # Dynamo of 2.11 traces no warnings
        fast=True,
    ),
    Case("an `autograd.Function`", of(OwnFunction), fast=True),
]
CASES = CAPTURE


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


def _train_on(step, data):
    """Train with a loop that skips invalid batches. Return the losses and the error messages."""
    losses, errors = [], []
    for batch in data:
        try:
            losses.append(step(batch))
        except BadBatchError as error:
            errors.append(str(error))
    return torch.stack(losses), errors


@pytest.mark.parametrize("at", [1, 5])
@pytest.mark.parametrize("speed", [{}, dict(compile=COMPILE)], ids=["eager", "compiled"])
def test_user_exception_is_raised_and_training_continues(at, speed):
    data = batches(STEPS)
    x, y = data[at - 1]
    data[at - 1] = x[:2], y[:2]
    seed()
    model = ByShape()
    step = accelerate(model, sgd(model), F.mse_loss, speed=speed)
    losses, errors = _train_on(lambda batch: step(batch)["loss"].clone(), data)
    assert errors == ["2 rows"]
    seed()
    other = ByShape()
    expected = by_hand(Training(other, sgd(other), batches=[batch for batch in data if len(batch[0]) > 2]))
    torch.testing.assert_close(losses, expected["losses"], **TOLERANCE)
    torch.testing.assert_close(model.state_dict(), expected["state"], **TOLERANCE)
    assert step.compiled_scope == ("step" if speed else None)
