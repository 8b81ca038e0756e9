"""Tests of the `ema` option."""

from torch import nn

from slipstream.hooks import EMAHook
from slipstream.model import StochasticWeightAverage
from slipstream.registry import MODELS
from slipstream.runner.builders import plan_hooks
from slipstream.speed import SpeedPlan


def build(value):
    """Return the average for `ema=value`."""
    return SpeedPlan.read(dict(ema=value)).ema.average(nn.BatchNorm1d(2))


def hook_of(value):
    """Return the Runner's EMA hook for `ema=value`."""
    (hook,) = plan_hooks(SpeedPlan.read(dict(ema=value)))
    assert isinstance(hook, EMAHook)
    return hook


def test_all_ema_options_are_passed_to_the_average_and_the_hook():
    value = dict(decay=0.9, type="exp", beta=3, interval=4, begin_epoch=2)
    average = build(value)
    assert (average.decay, average.decay_type, average.beta, average.interval) == (0.9, "exp", 3, 4)
    assert average.update_buffers
    hook = hook_of(value)
    assert (hook.begin_iter, hook.begin_epoch) == (0, 2)
    other = MODELS.build(hook._cfg, default_args={"model": nn.BatchNorm1d(2)})
    assert (other.decay, other.decay_type, other.beta, other.interval) == (0.9, "exp", 3, 4)
    assert hook_of(dict(begin_iter=7)).begin_iter == 7


def test_swa_is_the_arithmetic_mean():
    average = build(dict(type="swa", interval=5))
    assert isinstance(average, StochasticWeightAverage)
    assert average.interval == 5
    assert average.update_buffers
