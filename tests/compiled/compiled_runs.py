"""Train each case with a plain loop and with the public function `accelerate`, and compare the results."""

import gc
import logging
import random
import re
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slipstream import accelerate
from slipstream.errors import SlipstreamError

STEPS = 12
TOLERANCE = dict(rtol=1e-9, atol=1e-12)
"""Tolerance in float64. Rounding errors of about 1e-16 grow during the 12 steps."""
IN_FLOAT32 = dict(rtol=1e-6, atol=1e-8)
"""Tolerance for torch optimizers that compute step sizes in float32 when compiled."""
COMPILE = dict(backend="aot_eager", cache=False)
DECAY = 0.9
EMA = dict(decay=DECAY, type="constant")

ONE_GRAPH, FALLS_BACK, REFUSED = "one graph", "falls back", "raises an error"


@dataclass
class Training:
    """Model, optimizer, loss and batches. A case builds them twice with the same seed."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Any, Any], torch.Tensor] = F.mse_loss
    batches: list[Any] = field(default_factory=lambda: batches())
    before: dict[int, Callable[["Training"], Any]] = field(default_factory=dict)
    """Functions to call before a step, by step number (counted from 1)."""
    after: Callable[[], Any] = lambda: None
    """Function to call after each step, for example to step a scheduler."""
    observe: Callable[[], Any] = lambda: None
    """Function that returns further values to compare at the end."""
    end: Callable[[], Any] = lambda: None
    """Function that restores global state."""


@dataclass(frozen=True)
class Case:
    """A training run, and the expected behavior of its compiled step.

    Args:
        what: name of the case in the test id and in docs/matrix.md.
        make: builds the training.
        expect: ONE_GRAPH, FALLS_BACK or REFUSED.
        cause: a regular expression that the first warning, or the error, must match.
        line: the file that the warning must name, if any.
        speed: further speed options.
        fast: whether `make test` runs the case; `make matrix` runs the others.
        tolerance: tolerance for the comparison with the plain loop.
    """

    what: str
    make: Callable[[], Training]
    expect: str = ONE_GRAPH
    cause: str = ""
    line: str = ""
    speed: dict[str, Any] = field(default_factory=dict)
    fast: bool = False
    tolerance: dict[str, float] = field(default_factory=lambda: TOLERANCE)
    slow: bool = False
    warnings: int = 1
    """Number of warnings from a step that falls back: 2 if the model cannot be compiled either."""


def params_of(cases, fast_only=False):
    """Return the cases as test parameters."""
    return [
        pytest.param(case, id=case.what.replace("`", ""), marks=[] if fast_only else _marks(case))
        for case in cases
    ]


def _marks(case):
    if case.fast:
        return []
    return [pytest.mark.slow if case.slow else pytest.mark.matrix]


# ---- helpers ----------------------------------------------------------------------------------------------


def seed(number=0):
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def batches(count=STEPS, size=6, features=4, outputs=3, number=7):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(count, size, features, generator=generator, dtype=torch.float64)
    y = torch.randn(count, size, outputs, generator=generator, dtype=torch.float64)
    return [(x[i].clone(), y[i].clone()) for i in range(count)]


def net():
    """Return a small network with BatchNorm.

    The layer before BatchNorm has no bias, because the gradient of the bias would consist of rounding errors.
    """
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


def sgd(model, lr=0.05, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": lr, "momentum": 0.9, **options})


class Base(nn.Module):
    """A network that passes its activations through `change`."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8).double(), nn.Linear(8, 3).double()

    def change(self, x):
        return x

    def forward(self, x):
        return self.last(self.change(torch.tanh(self.first(x))))


# ---- training runs ----------------------------------------------------------------------------------------


def by_hand(training, window=1, decay=None):
    """Train with a plain loop. Return the values to compare."""
    seed(1)
    losses, average = [], None
    for number, (*inputs, targets) in enumerate(training.batches, 1):
        training.before.get(number, lambda _: None)(training)
        loss = training.loss(training.model(*inputs), targets)
        (loss / window).backward()
        if number % window == 0:
            training.optimizer.step()
            training.optimizer.zero_grad()
            if decay is not None:
                average = _averaged(average, training.model, decay)
        training.after()
        losses.append(loss.detach().clone())
    return _result(training, losses, average)


def _averaged(average, model, decay):
    now = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if average is None:
        return now
    return {
        name: decay * average[name] + (1 - decay) * value if value.is_floating_point() else value
        for name, value in now.items()
    }


def by_step(training, **speed):
    """Train with `accelerate`. Return the values to compare, the compiled scope at the end, and the warnings."""
    with warnings_of_slipstream() as said:
        step = accelerate(training.model, training.optimizer, training.loss, speed=speed)
        seed(1)
        losses, average = [], None
        for number, batch in enumerate(training.batches, 1):
            training.before.get(number, lambda _: None)(training)
            losses.append(step(batch)["loss"].detach().clone())
            training.after()
        scope = compiled_scope(step) if "compile" in speed else None
        if "ema" in speed:
            with step.averaged() as model:
                average = {name: value.detach().clone() for name, value in model.state_dict().items()}
        warnings = list(said)
        step.close()
    return _result(training, losses, average), scope, warnings


def compiled_scope(step):
    """Return the scope that is currently compiled: "step", "model", "block" or None."""
    return step.compiled_scope


def _result(training, losses, average):
    return {
        "losses": torch.stack(losses),
        "state": {name: value.detach().clone() for name, value in training.model.state_dict().items()},
        "gradients": [p.grad for p in training.optimizer.param_groups[0]["params"]],
        "average": average,
        "observed": training.observe(),
    }


@contextmanager
def warnings_of_slipstream():
    """Collect the warnings of the logger "slipstream" inside the context."""
    gc.collect()  # delete the steps of other tests first, because they log a report when they are deleted
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("slipstream")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


# ---- checks -----------------------------------------------------------------------------------------------


def check_plain(case):
    """Check that the eager step matches the plain loop. This validates the case itself."""
    speed = dict(case.speed)
    found, _, _ = _ended(by_step, case, **speed)
    assert_equal(found, _ended(by_hand, case, **_of_loop(speed)), case.tolerance)


def check_refused(case, **speed):
    """Check that training raises an error that names the cause."""
    with pytest.raises(SlipstreamError, match=case.cause):
        _ended(by_step, case, **speed)


def check(case):
    """Check that the compiled step matches the plain loop and that its compilation is as expected."""
    speed = {"compile": COMPILE, **case.speed}
    if case.expect == REFUSED:
        check_refused(case, **speed)
        return
    found, scope, warnings = _ended(by_step, case, **speed)
    assert_equal(found, _ended(by_hand, case, **_of_loop(speed)), case.tolerance)
    assert "compiler bug" not in " ".join(warnings), f"a compiler bug was reported: {warnings}"
    assert "slipstream/step/" not in " ".join(warnings), (
        f"a warning names a line in Slipstream instead of the user's line: {warnings}"
    )
    if case.expect == ONE_GRAPH:
        assert (scope, warnings) == ("step", []), (
            f"the step is not one graph, but has scope {scope}: {warnings}"
        )
        return
    assert scope != "step", "the step did not fall back"
    assert len(warnings) == case.warnings, f"{len(warnings)} warnings, not {case.warnings}: {warnings}"
    assert re.search(case.cause, warnings[0], re.IGNORECASE), f"the cause {case.cause} is not in {warnings}"
    assert case.line in warnings[0], f"the line in {case.line} is not in {warnings}"


def _ended(train, case, **options):
    """Build the case's training and run it."""
    seed()
    training = case.make()
    try:
        return train(training, **options)
    finally:
        training.end()


def assert_equal(found, expected, tolerance):
    torch.testing.assert_close(found["losses"], expected["losses"], **tolerance, msg=_numbers("losses"))
    for what in ("state", "gradients", "average", "observed"):
        _close(found[what], expected[what], tolerance, what)


def _close(found, expected, tolerance, what):
    """Compare numbers in nested dicts and lists. None equals only None."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), f"{what}: keys {list(found)}, not {list(expected)}"
        for name in expected:
            _close(found[name], expected[name], tolerance, f"{what}: {name}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), f"{what}: {len(found)} values, not {len(expected)}"
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            _close(one, other, tolerance, f"{what}[{number}]")
    elif isinstance(expected, torch.Tensor | float):
        assert found is not None, f"{what} is None"
        torch.testing.assert_close(found, expected, **tolerance, msg=_numbers(what))
    else:
        assert found == expected, f"{what}: {found}, not {expected}"


def _numbers(what):
    return lambda message: f"wrong numbers in {what}: {message}"


def _of_loop(speed):
    return {"window": speed.get("accumulate", 1), "decay": DECAY if "ema" in speed else None}
