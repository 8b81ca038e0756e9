"""Tests of the `ema` option."""

import pytest
import torch
from torch import nn

from slipstream.errors import ConfigError
from slipstream.hooks import EMAHook
from slipstream.model import ScheduledEMA, StochasticWeightAverage
from slipstream.runner.builders import plan_hooks
from slipstream.speed import SpeedPlan
from slipstream.speed.ema import EmaOptions, read_ema


def build(value):
    """Return the average for `ema=value`."""
    return read_ema(value).average(nn.BatchNorm1d(2))


def hook_of(value):
    """Return the Runner's EMA hook for `ema=value`."""
    (hook,) = plan_hooks(SpeedPlan.read(dict(ema=value)))
    assert isinstance(hook, EMAHook)
    return hook


@pytest.mark.parametrize("value", [None, False])
def test_ema_can_be_disabled(value):
    assert read_ema(value) is None


@pytest.mark.parametrize("value", [True, {}, EmaOptions()])
def test_ema_true_selects_the_supergradients_average(value):
    assert read_ema(value) == EmaOptions()
    average = build(value)
    assert isinstance(average, ScheduledEMA)
    assert (average.schedule.decay, average.schedule.decay_type) == (0.9999, "exp")
    assert average.schedule.at(40, 100) == pytest.approx(0.9999 * (1 - torch.e ** (-15 * 0.4)))


def test_all_ema_options_are_passed_to_the_average_and_the_hook():
    value = dict(decay=0.9, type="exp", beta=3, interval=4, begin_epoch=2)
    average = build(value)
    schedule = average.schedule
    assert (schedule.decay, schedule.decay_type, schedule.beta, average.interval) == (0.9, "exp", 3, 4)
    assert average.update_buffers
    hook = hook_of(value)
    assert (hook.begin_iter, hook.begin_epoch) == (0, 2)
    hooks_average = hook._new_average(nn.BatchNorm1d(2))
    assert (hooks_average.schedule, hooks_average.interval) == (schedule, 4)
    assert hook_of(dict(begin_iter=7)).begin_iter == 7


@pytest.mark.parametrize(("kind", "decay"), [("constant", 0.99), ("threshold", 8 / 17)])
def test_type_selects_the_decay_schedule(kind, decay):
    assert build(dict(decay=0.99, type=kind)).schedule.at(7, 10) == pytest.approx(decay)


def test_swa_is_the_arithmetic_mean():
    average = build(dict(type="swa", interval=5))
    assert isinstance(average, StochasticWeightAverage)
    assert average.interval == 5
    assert average.update_buffers


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, r"^ema: must be a dict"),
        ("exp", r"^ema: must be a dict"),
        (dict(deacy=0.9), r"^ema\.deacy: .*'decay'"),
        (dict(decay="0.9"), r"^ema\.decay: must be a finite float"),
        (dict(decay=0.0), r"^ema\.decay: must be between 0 and 1, not 0.0"),
        (dict(decay=1), r"^ema\.decay: must be between 0 and 1, not 1"),
        (dict(decay=-0.5), r"^ema\.decay: must be between"),
        (dict(type="treshold"), r"^ema\.type: .*did you mean 'threshold'"),
        (dict(type="threshold", beta=15), r"^ema\.beta: only applies to decay_type 'exp'"),
        (dict(beta=-1), r"^ema\.beta: must be positive"),
        (dict(type="swa", decay=0.9), r"^ema\.decay: does not apply to type 'swa'"),
        (dict(type="swa", beta=1), r"^ema\.beta: does not apply to type 'swa'"),
        (dict(interval=0), r"^ema\.interval: must be an int of at least 1"),
        (dict(begin_iter=-1), r"^ema\.begin_iter: must be an int of at least 0"),
        (dict(begin_epoch=-2), r"^ema\.begin_epoch: must be an int of at least 0"),
        (dict(begin_iter=1, begin_epoch=1), r"^ema\.begin_epoch: .*not both"),
        (dict(momentum=0.1), r"^ema\.momentum: .*decay"),
        (dict(momentum=0.1, decay=0.9), r"^ema\.momentum: .*decay"),
    ],
)
def test_invalid_ema_option_error_names_the_key(value, message):
    with pytest.raises(ConfigError, match=message):
        read_ema(value)
