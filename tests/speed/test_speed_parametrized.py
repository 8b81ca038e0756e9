"""Tests of models with `spectral_norm`, which updates its buffers each time the weight is read in training mode."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from slipstream import accelerate


def critic():
    torch.manual_seed(0)
    return nn.Sequential(
        spectral_norm(nn.Conv2d(3, 8, 3)), nn.ReLU(), nn.Flatten(), spectral_norm(nn.Linear(288, 2))
    )


def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, 8, 8, generator=generator), torch.tensor([0, 1, 1, 0])) for _ in range(4)]


def by_hand(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for images, labels in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("speed", [{}, "auto", dict(ema=dict(type="threshold"))], ids=str)
def test_accelerate_matches_a_plain_loop_exactly(speed):
    model = critic()
    expected = by_hand(copy.deepcopy(model))
    step = accelerate(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, speed=speed)
    for batch in batches():
        step(batch)
    torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)
