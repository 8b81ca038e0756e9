"""Gradient centralization matches a plain loop that subtracts the mean from each gradient."""

import pytest

from part_runs import HOW, adamw, assert_equal, by_hand, differ, trained


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
