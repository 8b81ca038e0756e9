"""Gradient centralization matches a plain loop that subtracts the mean from each gradient."""

import pytest
import torch

from part_runs import HOW, adamw, assert_equal, by_hand, differ, run, trained
from slipstream.errors import ConfigError, UnknownNameError
from slipstream.speed import SpeedPlan
from slipstream.speed.gradient_centralization import CentralizeGradients


def centralized(params, grads, least=2):
    """Return gradients whose rows have zero mean."""
    return [
        (grad.flatten(1) - grad.flatten(1).mean(1)[:, None]).view_as(grad) if grad.ndim >= least else grad
        for grad in grads
    ]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("together", [False, True])
def test_gradient_centralization_matches_a_plain_loop(how, together):
    expected = by_hand(change=centralized, together=together)
    assert differ(expected, by_hand(together=together))
    assert_equal(trained(how, together=together, gradient_centralization=True), expected)


@pytest.mark.parametrize("how", HOW)
def test_conv_only_skips_linear_layers(how):
    expected = by_hand(adamw, change=lambda params, grads: centralized(params, grads, 3))
    assert differ(expected, by_hand(adamw, change=centralized))
    assert_equal(trained(how, adamw, gradient_centralization=dict(conv_only=True)), expected)


@pytest.mark.parametrize("how", HOW)
def test_gradient_centralization_in_a_runner_matches_a_plain_loop(how, tmp_path):
    found, runner = run(tmp_path, how, together=True, gradient_centralization=True)
    assert_equal(found, by_hand(change=centralized, together=True))
    kinds = [type(part).__name__ for part in runner.optim_wrapper.parts]
    assert kinds == ["CentralizeGradients", "ClipGradients", "AveragePart"]


def test_centralized_gradients_have_zero_mean_rows():
    grads = [torch.randn(4, 3, 2, 2), torch.randn(4, 3), torch.randn(4)]
    bias = grads[2].clone()
    CentralizeGradients().before_update([], grads)
    for grad in grads[:2]:
        torch.testing.assert_close(grad.flatten(1).mean(1), torch.zeros(4))
    assert torch.equal(grads[2], bias)


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ("yes", ConfigError, "speed.gradient_centralization: must be a dict"),
        (dict(conv_onyl=True), UnknownNameError, "did you mean 'conv_only'"),
        (dict(conv_only=1.5), ConfigError, "speed.gradient_centralization.conv_only: must be a bool"),
    ],
)
def test_invalid_value_error_contains_the_config_path(value, kind, message):
    with pytest.raises(kind, match=message):
        SpeedPlan.read(dict(gradient_centralization=value))


@pytest.mark.parametrize("value", [None, False])
def test_option_can_be_disabled(value):
    assert SpeedPlan.read(dict(gradient_centralization=value)).gradient_centralization is None
