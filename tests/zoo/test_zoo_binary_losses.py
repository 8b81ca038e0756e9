"""Tests of the losses for binary masks and of `ShelfNetOHEMLoss`, against reference implementations in float64."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from slipstream.registry import MODELS
from slipstream.training.losses import loss_config
from slipstream.zoo import FocalLoss


def mask_batch(seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(3, 1, 5, 4, generator=generator, dtype=dtype)
    return logits, torch.randint(0, 2, (3, 5, 4), generator=generator)


def sigmoid(value):
    return 1 / (1 + math.exp(-value))


def pairs(logits, targets):
    return list(zip(logits.double().flatten().tolist(), targets.flatten().tolist(), strict=True))


def binary_cross_entropy(logit, target):
    p = sigmoid(logit)
    return -target * math.log(p) - (1 - target) * math.log(1 - p)


@pytest.mark.parametrize("applies_sigmoid", [True, False])
def test_bce_dice_is_the_weighted_sum_of_both_losses(applies_sigmoid):
    logits, targets = mask_batch()
    found = MODELS.build(
        loss_config({"BCEDiceLoss": {"loss_weights": [0.3, 0.9], "logits": applies_sigmoid}})
    )(logits, targets)
    values = pairs(logits, targets)
    cross_entropy = sum(binary_cross_entropy(*pair) for pair in values) / len(values)
    p = [sigmoid(logit) if applies_sigmoid else logit for logit, _ in values]
    t = [target for _, target in values]
    overlap = sum(a * b for a, b in zip(p, t, strict=True))
    dice = 1 - (2 * overlap + 1) / (sum(p) + sum(t) + 1e-5 + 1)
    assert found.item() == pytest.approx(0.3 * cross_entropy + 0.9 * dice, rel=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weight", [None, 2.5])
def test_focal_loss_is_weighted_binary_cross_entropy(reduction, weight):
    logits, targets = mask_batch(1)
    scale = None if weight is None else torch.tensor(weight)
    wrapped = nn.BCEWithLogitsLoss(weight=scale, reduction=reduction)
    found = FocalLoss(wrapped, gamma=2.0, alpha=0.4)(logits, targets)
    wanted = []
    for logit, target in pairs(logits, targets):
        p = sigmoid(logit)
        right = p if target else 1 - p
        factor = (0.4 if target else 0.6) * (1 - right) ** 2.0
        wanted.append(factor * binary_cross_entropy(logit, target) * (weight or 1))
    if reduction == "none":
        torch.testing.assert_close(found.flatten(), torch.tensor(wanted, dtype=torch.float64))
    else:
        total = sum(wanted) / (len(wanted) if reduction == "mean" else 1)
        assert found.item() == pytest.approx(total, rel=1e-12)
    assert wrapped.reduction == reduction


def hard_pixels(logits, targets, ignored, share, threshold):
    """Return the mean loss over the hard pixels of one output, selected as in SuperGradients."""
    z = np.moveaxis(logits.double().numpy(), 1, -1).reshape(-1, logits.shape[1])
    t = targets.numpy().reshape(-1)
    z, t = z[t != ignored], t[t != ignored]
    losses = np.sort(np.log(np.exp(z).sum(1)) - z[np.arange(t.size), t])[::-1]
    count = min(int(share * t.size), t.size - 1)
    limit = -math.log(threshold)
    return (losses[losses > limit] if losses[count] > limit else losses[:count]).mean()


@pytest.mark.parametrize("spread", [0.1, 2.0, 8.0])
def test_shelfnet_ohem_sums_over_all_outputs(spread):
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(0, 4, (2, 12, 10), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = 255
    truth = nn.functional.one_hot(targets % 255, 4).movedim(-1, 1).double()
    outputs = [
        spread * truth + torch.randn(2, 4, 12, 10, generator=generator, dtype=torch.float64) for _ in range(3)
    ]
    loss = MODELS.build(loss_config("shelfnet_ohem_loss", {"mining_percent": 0.05}))
    found = loss(outputs, targets)
    assert list(found) == ["loss_main", "loss_aux0", "loss_aux1"]
    wanted = [hard_pixels(output, targets, 255, 0.05, 0.7) for output in outputs]
    assert [value.item() for value in found.values()] == pytest.approx(wanted, rel=1e-9)
