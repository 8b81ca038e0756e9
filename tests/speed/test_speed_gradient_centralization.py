"""Gradient centralization trains as a loop by hand that subtracts means from gradients."""

import pytest
import torch

from part_runs import HOW, adamw, assert_equal, by_hand, differ, run, trained
from slipstream.errors import ConfigError, UnknownNameError
from slipstream.speed import SpeedPlan
from slipstream.speed.gradient_centralization import CentralizeGradients


def centralized(params, grads, least=2):
    """Return gradients whose rows have the mean zero."""
    return [
        (grad.flatten(1) - grad.flatten(1).mean(1)[:, None]).view_as(grad) if grad.ndim >= least else grad
        for grad in grads
    ]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("together", [False, True])
def test_it_trains_as_a_loop_by_hand(how, together):
    expected = by_hand(change=centralized, together=together)
    assert differ(expected, by_hand(together=together))
    assert_equal(trained(how, together=together, gradient_centralization=True), expected)


@pytest.mark.parametrize("how", HOW)
def test_conv_only_leaves_linear_layers(how):
    expected = by_hand(adamw, change=lambda params, grads: centralized(params, grads, 3))
    assert differ(expected, by_hand(adamw, change=centralized))
    assert_equal(trained(how, adamw, gradient_centralization=dict(conv_only=True)), expected)


@pytest.mark.parametrize("how", HOW)
def test_a_runner_trains_alike(how, tmp_path):
    found, runner = run(tmp_path, how, together=True, gradient_centralization=True)
    assert_equal(found, by_hand(change=centralized, together=True))
    kinds = [type(part).__name__ for part in runner.optim_wrapper.parts]
    assert kinds == ["CentralizeGradients", "ClipGradients", "AveragePart"]


def test_rows_of_centralized_gradients_have_the_mean_zero():
    grads = [torch.randn(4, 3, 2, 2), torch.randn(4, 3), torch.randn(4)]
    bias = grads[2].clone()
    CentralizeGradients().before_update([], grads)
    for grad in grads[:2]:
        torch.testing.assert_close(grad.flatten(1).mean(1), torch.zeros(4))
    assert torch.equal(grads[2], bias)


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ("yes", ConfigError, "speed.gradient_centralization: expected a dict"),
        (dict(conv_onyl=True), UnknownNameError, "did you mean 'conv_only'"),
        (dict(conv_only=1.5), ConfigError, "speed.gradient_centralization.conv_only: expected bool"),
    ],
)
def test_bad_input_is_refused_with_its_place(value, kind, message):
    with pytest.raises(kind, match=message):
        SpeedPlan.read(dict(gradient_centralization=value))


@pytest.mark.parametrize("value", [None, False])
def test_off_is_off(value):
    assert SpeedPlan.read(dict(gradient_centralization=value)).gradient_centralization is None
