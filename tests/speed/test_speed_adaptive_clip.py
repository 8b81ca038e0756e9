"""Adaptive clipping matches a plain loop that clips each unit separately."""

import pytest
import torch
from torch import nn

from part_runs import HOW, assert_equal, by_hand, differ, run, trained
from slipstream.errors import ConfigError, UnknownNameError
from slipstream.speed import SpeedPlan
from slipstream.speed.adaptive_clip import ClipUnits

FACTOR, EPS = 0.02, 1e-3


def clipped(params, grads, excluded=()):
    """Return the gradients with each unit clipped separately."""
    found = []
    for number, (param, grad) in enumerate(zip(params, grads, strict=True)):
        grad = grad.clone()
        units = [...] if param.ndim <= 1 else range(len(param))
        for unit in units if number not in excluded else []:
            norm = float(grad[unit].square().sum().sqrt())
            limit = FACTOR * max(float(param[unit].square().sum().sqrt()), EPS)
            if norm > limit:
                grad[unit] *= limit / norm
        found.append(grad)
    return found


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("together", [False, True])
def test_adaptive_clip_matches_a_plain_loop(how, together):
    expected = by_hand(change=clipped, together=together)
    assert differ(expected, by_hand(together=together))
    assert_equal(trained(how, together=together, adaptive_clip=dict(clip_factor=FACTOR, eps=EPS)), expected)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("exclude", [["head"], ["Linear"], ["he*"]])
def test_excluded_modules_are_not_clipped(how, exclude):
    options = dict(clip_factor=FACTOR, exclude=exclude)
    expected = by_hand(change=lambda params, grads: clipped(params, grads, (9, 10)))
    assert differ(expected, by_hand(change=clipped))
    assert_equal(trained(how, adaptive_clip=options), expected)


@pytest.mark.parametrize("how", HOW)
def test_adaptive_clip_in_a_runner_matches_a_plain_loop(how, tmp_path):
    found, runner = run(tmp_path, how, together=True, adaptive_clip=dict(clip_factor=FACTOR))
    assert_equal(found, by_hand(change=clipped, together=True))
    assert type(runner.optim_wrapper.parts[0]) is ClipUnits


def test_nonfinite_and_zero_gradients_are_not_clipped():
    params = [nn.Parameter(torch.ones(3, 2))]
    grads = [torch.tensor([[torch.inf, 1.0], [torch.nan, 1.0], [0.0, 0.0]])]
    ClipUnits(0.01, 1e-3).before_update(params, grads)
    assert not grads[0][0].isfinite().all()
    assert not grads[0][1].isfinite().all()
    assert torch.equal(grads[0][2], torch.zeros(2))


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (0.01, ConfigError, "speed.adaptive_clip: must be a dict"),
        (dict(clip=0.1), UnknownNameError, "did you mean 'clip_factor'"),
        (dict(clip_factor=0.0), ConfigError, "speed.adaptive_clip.clip_factor: must be positive, not 0.0"),
        (dict(eps=-1.0), ConfigError, "speed.adaptive_clip.eps: must be positive"),
        (dict(exclude="head"), ConfigError, "speed.adaptive_clip.exclude: must be a list"),
    ],
)
def test_invalid_value_error_contains_the_config_path(value, kind, message):
    with pytest.raises(kind, match=message):
        SpeedPlan.read(dict(adaptive_clip=value))


@pytest.mark.parametrize("train", [trained, lambda how, **options: run("unused", how, **options)])
def test_error_for_unknown_module_name_suggests_the_nearest_name(train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = "speed.adaptive_clip.exclude: no module name or class in the model matches 'haed'.*'head'"
    with pytest.raises(ConfigError, match=message):
        train("eager", adaptive_clip=dict(exclude=["haed"]))
