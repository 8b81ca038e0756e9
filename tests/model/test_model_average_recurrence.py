"""Averages of random configurations compared with a recurrence in float64, which is written without the package."""

import math
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.nn.utils import spectral_norm as old_spectral_norm

from slipstream import accelerate
from slipstream.errors import ConfigError
from slipstream.model import ExponentialMovingAverage, ScheduledEMA
from slipstream.speed import SpeedPlan

COPIED = (
    "weight_u",
    "weight_v",
    "0._u",
    "0._v",
    "weight_mask",
    "direction",
    "num_batches_tracked",
    "table",
    "scratch",
)


class OwnNorm(nn.Module):
    """A user's spectral norm, a buffer with expanded memory, buffers that share memory, and a quantized table."""

    def __init__(self):
        super().__init__()
        self.register_buffer("direction", F.normalize(torch.randn(6), dim=0))
        self.register_buffer("expanded", torch.zeros(1).expand(6))
        memory = torch.zeros(8)
        self.register_buffer("one", torch.zeros(1))
        self.register_buffer("same", torch.zeros(1))
        self.register_buffer("low", memory[:5])
        self.register_buffer("high", memory[3:])
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.table = nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.direction.copy_(F.normalize(self.direction + 0.3 * x.mean(0), dim=0))
                self.low.add_(0.1 * x.mean())
                self.expanded = self.expanded + 0.05 * x.abs().mean()
                self.scratch += 1
                self.one = self.same = x[:1, 0].clone()
        return x + self.low.mean() + self.high.mean() + self.expanded


def net(norms=True):
    torch.manual_seed(0)
    tied = nn.Linear(6, 6)
    middle = (
        [parametrizations.spectral_norm(nn.Linear(6, 6)), old_spectral_norm(nn.Linear(6, 6))] if norms else []
    )
    return nn.Sequential(
        nn.Linear(3, 6), nn.BatchNorm1d(6), tied, *middle, nn.Tanh(), tied, OwnNorm(), nn.Linear(6, 2)
    )


def snapshot(model):
    return {name: value.detach().double().clone() for name, value in model.state_dict().items()}


def recurrence(states, coefficient, interval=1):
    """Return the average after `states`, given `coefficient(k)` for the k-th state (counted from 1)."""
    mean = states[0]
    for k, state in enumerate(states[1:], start=2):
        if (k - 1) % interval == 0:
            share = coefficient(k)
            mean = {name: mean[name] + share * (state[name] - mean[name]) for name in mean}
    return mean


def decay_of(kind, decay, beta, s, total):
    if kind == "constant":
        return decay
    if kind == "threshold":
        return min(decay, (1 + s) / (10 + s))
    return decay * (1 - math.exp(-beta * s / total))


@pytest.mark.parametrize(
    ("seed", "compile"),
    [
        *((seed, None) for seed in range(10)),
        *((seed, dict(scope="step", backend="aot_eager")) for seed in (0, 3, 4, 8, 9)),
    ],
)
def test_random_averages_match_a_recurrence_in_float64(seed, compile):
    rng = random.Random(seed)
    total, window = rng.randint(9, 24), rng.choice([1, 1, 2, 3])
    kind, begin, interval = (
        rng.choice(["constant", "threshold", "exp", "swa"]),
        rng.choice([0, 0, 1, 4, 5]),
        rng.choice([1, 1, 3]),
    )
    options = dict(type=kind, begin_iter=begin, interval=interval, update_buffers=rng.random() < 0.7)
    decay, beta = rng.uniform(0.3, 0.95), rng.uniform(1, 9)
    if kind != "swa":
        options |= dict(decay=decay, count=rng.choice(["updates", "batches"]))
    if kind == "exp":
        options["beta"] = beta
    model = net(norms=compile is None)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    epoch = rng.choice([None, 5])
    step = accelerate(
        model,
        sgd,
        F.mse_loss,
        dict(ema=options, accumulate=window, compile=compile),
        total,
        batches_per_epoch=epoch,
    )
    states, numbers = [], []
    for batch in range(1, total + 1):
        step((torch.randn(8, 3), torch.randn(8, 2)))
        if step.updated and batch >= begin:
            states.append(snapshot(model))
            numbers.append(batch - max(begin - 1, 0))
    by_batch = options.get("count") == "batches"

    def coefficient(k):
        if kind == "swa":
            return 1 / ((k - 1) // interval + 1)
        s, of = (numbers[k - 1], numbers[-1]) if by_batch else (k, len(states))
        return 1 - decay_of(kind, decay, beta, s, of)

    average, found, last = (
        recurrence(states, coefficient, interval),
        step.average.module.state_dict(),
        states[-1],
    )
    for name, value in found.items():
        is_buffer = name in dict(step.average.module.named_buffers())
        copied = name.endswith(COPIED) or (is_buffer and not options["update_buffers"])
        wanted = snapshot(model)[name] if copied else average[name]
        torch.testing.assert_close(
            value.double(), wanted, rtol=2e-5, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}"
        )
    assert not torch.allclose(found["0.weight"].double(), last["0.weight"], atol=1e-5)
    assert compile is None or step.inner.batches > 0
    with step.averaged():
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, found[name], rtol=0, atol=0)
    for name, value in snapshot(model).items():
        torch.testing.assert_close(value, last[name], rtol=0, atol=0)


def test_pruned_weights_keep_their_mask():
    model = prune.random_unstructured(nn.Linear(4, 4), "weight", amount=0.5)
    average = ScheduledEMA(model, decay=0.5, decay_type="constant")
    for _ in range(3):
        model.weight_mask.copy_(torch.rand(4, 4) < 0.5)
        average.update_parameters(model)
    average.copy_buffers(model)
    assert torch.equal(average.module.weight_mask, model.weight_mask)


def test_first_update_copies_even_if_the_initial_values_are_not_finite():
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, math.nan)
    average = ExponentialMovingAverage(model, momentum=0.5)
    nn.init.constant_(model.weight, 3.0)
    average.update_parameters(model)
    assert average.module.weight.tolist() == [[3.0, 3.0]] * 2


@pytest.mark.parametrize("value", ["yes", 1])
def test_update_buffers_must_be_a_bool(value):
    with pytest.raises(ConfigError, match="update_buffers"):
        SpeedPlan.read({"ema": {"update_buffers": value}})


def test_batch_that_raises_an_error_is_not_counted():
    model = nn.Linear(2, 1)
    step = accelerate(
        model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss, dict(ema=dict(type="swa"))
    )
    batch = torch.ones(4, 2), torch.ones(4, 1)
    step(batch)
    with pytest.raises(RuntimeError):
        step((torch.ones(4, 3), torch.ones(4, 1)))
    assert step.average.steps == 1
    first = model.weight.detach().clone()
    step(batch)
    torch.testing.assert_close(step.average.module.weight, (first + model.weight.detach()) / 2)
    assert step.average.steps == 2
