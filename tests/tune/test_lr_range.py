"""Tests of the learning rate range test."""

import math
import random
from contextlib import suppress

import pytest
import torch
from PIL import Image
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import tiny_runs
from slipstream.errors import ConfigError
from slipstream.tune.api import config_job
from slipstream.tune.lr_range import LrRange, sweep_lr
from slipstream.tune.observer import Finished, LrSweep


def rates(count=100):
    return [1e-7 * 1e7 ** (i / (count - 1)) for i in range(count)]


def curve(rate):
    """Return a loss that falls around a learning rate of 1e-3 and rises above 1e-1."""
    return 2.0 - 1.0 / (1.0 + (1e-3 / rate) ** 2) + 5 * max(rate - 0.1, 0)


def test_suggestion_is_near_the_steepest_descent():
    found = LrRange(rates(), [curve(rate) for rate in rates()])
    assert 6e-4 < found.suggestion < 1.6e-3  # as a function of log(rate), the loss falls fastest at 1e-3
    assert "Suggested learning rate" in str(found)


@pytest.mark.parametrize("steps", [100, 200])
def test_noisy_losses_of_small_batches_barely_change_the_suggestion(steps):
    found = []
    for seed in range(30):
        generator = random.Random(seed)
        losses = [curve(rate) * (1 + generator.gauss(0, 0.3)) for rate in rates(steps)]
        found.append(LrRange(rates(steps), losses).suggestion)
    near = [rate is not None and 2.5e-4 < rate < 4e-3 for rate in found]
    assert sum(near) >= 25


@pytest.mark.parametrize("steps", [60, 100, 300])
@pytest.mark.parametrize(
    "draw", [lambda g: 2.3 + g.gauss(0, 0.3), lambda g: g.expovariate(1)], ids=["gauss", "exp"]
)
def test_curves_that_show_only_noise_suggest_no_rate(steps, draw):
    found = []
    for seed in range(50):
        generator = random.Random(seed)
        found.append(LrRange(rates(steps), [draw(generator) for _ in range(steps)]))
    assert sum(each.suggestion is not None for each in found) <= 2
    assert "did not fall by more than its noise" in str(found[0])


def test_no_rate_is_suggested_if_the_loss_never_falls_or_the_sweep_is_too_short():
    assert LrRange(rates(), [1.0 + i for i in range(100)]).suggestion is None
    assert LrRange(rates()[:5], [5.0, 4.0, 3.0, 2.0, 1.0]).suggestion is None
    assert "did not fall" in str(LrRange(rates(), [1.0] * 100))
    assert "diverged within 10 steps; start at a lower" in str(LrRange(rates()[:6], [2.0] * 5 + [math.nan]))


def test_a_loss_that_is_not_finite_is_left_out_of_the_smoothed_curve():
    found = LrRange(rates()[:20], [2.0 - 0.05 * i for i in range(19)] + [math.nan])
    assert len(found.smoothed) == 19
    assert all(map(math.isfinite, found.smoothed))


def test_plot_is_a_png_file(tmp_path):
    path = LrRange(rates(), [curve(rate) for rate in rates()]).plot(tmp_path / "lr.png")
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert len(image.convert("RGB").getcolors(10**6)) > 10
    assert [p.name for p in tmp_path.iterdir()] == ["lr.png"]


@pytest.mark.parametrize(
    ("start", "end", "steps"), [(0, 1, 50), (1, 0.1, 50), (1e-5, math.inf, 50), (1e-5, 1, 3)]
)
def test_invalid_ranges_are_rejected(start, end, steps):
    with pytest.raises(ConfigError, match="find_lr: requires"):
        sweep_lr(lambda setting: None, start, end, steps, 60)


class Sent(list):
    """A list that replaces the sending end of a connection."""

    send = list.append


@pytest.mark.parametrize("offset", [0.0, -100.0])
def test_noisy_and_negative_losses_do_not_end_the_sweep(offset):
    generator, sent = random.Random(0), Sent()
    sweep = LrSweep(sent, 1e-7, 1.0, 100)
    weight = nn.Parameter(torch.zeros(1))
    for rate in rates():
        sweep.before_step(SGD([weight], lr=0.1).param_groups)
        try:
            sweep.after_step(torch.tensor(curve(rate) * generator.choice([0.3, 1.7]) + offset))
        except Finished:
            break
    assert len(sent[-1]["losses"]) == 100


def test_divergence_ends_the_sweep():
    sweep = LrSweep(Sent(), 1e-7, 1.0, 100)
    for _ in range(30):
        sweep.after_step(torch.tensor(1.0))
    with pytest.raises(Finished):
        sweep.after_step(torch.tensor(100.0))


def test_accumulated_batches_are_one_step(tmp_path):
    """Four batches of 8 samples per update are equivalent to one batch of 32 samples."""

    def sweep(size, counts):
        data = TensorDataset(*tiny_runs.samples(32))
        optim = dict(optimizer=dict(type="SGD", lr=0.1), accumulative_counts=counts)
        cfg = tiny_runs.training(
            tmp_path, train_dataloader=tiny_runs.loader(data, size, shuffle=False), optim_wrapper=optim
        )
        return sweep_lr(config_job(cfg), 1e-4, 1.0, 12, 60)

    whole, accumulated = sweep(32, 1), sweep(8, 4)
    assert accumulated.rates == whole.rates
    assert accumulated.losses == pytest.approx(whole.losses, rel=1e-5)


@pytest.mark.parametrize("jump", [10.0, 1e3, 1e6])
def test_divergence_at_the_end_does_not_change_the_suggestion(jump):
    def falling(rate):
        return 2.3 - 1.5 / (1 + (1e-4 / rate) ** 2)

    sent = Sent()
    sweep = LrSweep(sent, 1e-7, 1.0, 100)
    with suppress(Finished):
        for rate in rates():
            sweep.after_step(torch.tensor(falling(rate) + (jump if rate > 1e-2 else 0)))
    found = LrRange(sent[-1]["rates"], sent[-1]["losses"])
    assert found.rates[-1] < 0.1
    expected = LrRange(rates(), [falling(rate) for rate in rates()]).suggestion
    assert expected / 1.3 < found.suggestion < expected * 1.3
