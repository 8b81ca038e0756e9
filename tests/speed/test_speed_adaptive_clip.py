"""Adaptive clipping matches a plain loop that clips each unit separately."""

import pytest
import torch
from torch import nn

from part_runs import HOW, assert_equal, by_hand, differ, trained
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


def test_nonfinite_and_zero_gradients_are_not_clipped():
    params = [nn.Parameter(torch.ones(3, 2))]
    grads = [torch.tensor([[torch.inf, 1.0], [torch.nan, 1.0], [0.0, 0.0]])]
    ClipUnits(0.01, 1e-3).before_update(params, grads)
    assert not grads[0][0].isfinite().all()
    assert not grads[0][1].isfinite().all()
    assert torch.equal(grads[0][2], torch.zeros(2))
