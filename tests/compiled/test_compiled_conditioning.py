"""Tests of ill-conditioned networks, computed weights and compiler bugs."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from compiled_runs import (
    COMPILE,
    FALLS_BACK,
    TOLERANCE,
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
from functorch.compile import nop
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.utils import parametrizations

HERE = Path(__file__).name


# ---- ill-conditioned in float32 ---------------------------------------------------------------------------


def assert_as_close_as_eager(make, **speed):
    """Check that compiled float32 losses are about as close to float64 losses as those of a plain float32 loop.

    Rounding errors grow from step to step, so float32 has no fixed tolerance. The error of the compiled losses
    relative to float64 may be up to ten times that of the eager float32 losses.
    """

    def trained(dtype):
        seed()
        return by_hand(make(dtype))["losses"].double()

    exact, rounded = trained(torch.float64), trained(torch.float32)
    seed()
    found, scope, said = by_step(make(torch.float32), **speed)
    off, allowed = (found["losses"].double() - exact).abs(), (rounded - exact).abs().cummax(0).values
    assert (off <= 10 * allowed + 1e-5 * exact.abs()).all(), (
        f"error {off} exceeds ten times the eager error {allowed}"
    )
    assert "compiler bug" not in " ".join(said), said
    assert (scope, said) == ("step", [])


def deep(dtype, blocks=60, width=16, steps=8):
    layers = [
        nn.Sequential(nn.Linear(width, width, bias=False), nn.BatchNorm1d(width), nn.ReLU())
        for _ in range(blocks)
    ]
    model = nn.Sequential(*layers, nn.Linear(width, 3)).to(torch.float64).to(dtype)
    data = [(x.to(dtype), y.to(dtype)) for x, y in batches(steps, 4, width)]
    return Training(model, sgd(model, lr=1e-3), batches=data)


def deep_with_adam(dtype):
    training = deep(dtype, blocks=20)
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-4)
    return training


@pytest.mark.matrix
@pytest.mark.parametrize("make", [deep, deep_with_adam])
def test_rounding_is_not_reported_as_a_compiler_bug(make):
    assert_as_close_as_eager(make, compile=COMPILE)


# ---- computed weights ------------------------------------------------------------------------------------


def plain():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def normed(norm, **options):
    """Return a function that builds a run with a network whose first layer has a computed weight."""

    def make():
        model = plain()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            norm(model[0], **options)
        return Training(model, sgd(model))

    return make


def tied():
    """Return a run with two layers that share a weight."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3)).double()
    model[2].weight = model[0].weight
    return Training(model, sgd(model))


class Copied(nn.Module):
    """A network that copies its layer in forward and calls the copy, so each step has new parameter objects."""

    def __init__(self):
        super().__init__()
        self.inner = plain()

    def forward(self, x):
        with torch.no_grad():
            target = copy.deepcopy(self.inner)(x)
        return self.inner(x) + 0.1 * target


class Momentum(nn.Module):
    """A network and a copy. The forward method moves the copy's weights towards the network's weights."""

    def __init__(self):
        super().__init__()
        self.inner = plain()
        self.follower = copy.deepcopy(self.inner).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for mine, theirs in zip(self.follower.parameters(), self.inner.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
            target = self.follower(x)
        return self.inner(x) + 0.1 * target


def of(module):
    def make():
        model = module()
        return Training(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05))

    return make


COMPUTED = [
    Case(
        "`torch.nn.utils.weight_norm`", normed(nn.utils.weight_norm), FALLS_BACK, "requires grad", fast=True
    ),
    Case("`parametrizations.spectral_norm`", normed(parametrizations.spectral_norm)),
    Case("tied weights", tied),
    Case("a second network that forward updates", of(Momentum)),
    Case("a layer that forward copies", of(Copied), FALLS_BACK, line=HERE),
]


@pytest.mark.parametrize("case", params_of(COMPUTED, fast_only=True))
def test_eager_step_matches_a_plain_loop(case):
    check_plain(case)


@pytest.mark.parametrize("case", params_of(COMPUTED))
def test_compiled_step_matches_a_plain_loop(case):
    check(case)


# ---- compiler bugs ----------------------------------------------------------------------------------------


def _nothing_added(zeros, indices, values, accumulate=False):
    return zeros.clone()


def _not_multiplied(grad, output):
    return grad.clone()


def _halved(grad, self, threshold):
    return grad * (self > threshold) * 0.5


DEFECTS = {
    "the gradient of an interpolation is lost": (torch.ops.aten._unsafe_index_put, _nothing_added),
    "the gradient of tanh is wrong": (torch.ops.aten.tanh_backward, _not_multiplied),
    "the gradient of ReLU is halved": (torch.ops.aten.threshold_backward, _halved),
}


class Upsampled(nn.Module):
    """A network with two heads whose outputs differ in size and are resized to the size of the input."""

    def __init__(self, classes=5):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.Tanh())
        self.heads = nn.ModuleList(nn.Conv2d(8, classes, 1) for _ in range(2))

    def forward(self, x):
        early = self.stem(x)
        maps = (self.heads[0](early), self.heads[1](self.deep(early)))
        return [F.interpolate(m, x.shape[-2:], mode="bilinear", align_corners=False) for m in maps]


def cross_entropy_and_dice(outputs, targets):
    loss = 0.0
    for scores in outputs:
        shares, truth = (
            scores.softmax(1),
            F.one_hot(targets, scores.shape[1]).permute(0, 3, 1, 2).to(scores.dtype),
        )
        overlap, both = (shares * truth).sum((2, 3)), (shares + truth).sum((2, 3))
        loss = loss + F.cross_entropy(scores, targets) + (1 - (2 * overlap + 1) / (both + 1)).mean()
    return loss


def upsampled(dtype=torch.float64, steps=8, size=16):
    model = Upsampled().to(torch.float64).to(dtype)
    generator = torch.Generator().manual_seed(0)
    data = [
        (
            torch.randn(4, 3, size, size, generator=generator, dtype=torch.float64).to(dtype),
            torch.randint(0, 5, (4, size, size), generator=generator),
        )
        for _ in range(steps)
    ]
    return Training(model, sgd(model), cross_entropy_and_dice, data)


@pytest.mark.matrix
@pytest.mark.parametrize("what", DEFECTS)
def test_compiler_bug_is_detected(what):
    """The backend computes one backward formula incorrectly. Training must not use its graph."""
    operator, wrong = DEFECTS[what]
    wrongly = aot_autograd(fw_compiler=nop, decompositions={operator.default: wrong})
    seed()
    expected = by_hand(upsampled())
    seed()
    found, scope, said = by_step(upsampled(), compile=dict(backend=wrongly, cache=False, scope="step"))
    assert_equal(found, expected, TOLERANCE)
    assert scope != "step"
    assert len(said) == 1, said
    assert "gradient" in said[0]
