from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from slipstream.errors import ModelError
from slipstream.zoo import OhemCELoss, STDCLoss
from slipstream.zoo.stdc_loss import detail_target

IGNORE = 19
# Binary floating point represents these fractions exactly, so the number of pixels to keep has no rounding error.
SHARES = [0.0, 1 / 16, 0.25, 0.5, 1.0]


def reference_ohem(logits, targets, threshold=0.7, share=1 / 16):
    """Select the losses of pixels that are not ignored, sort them, and average the hard ones in float64."""
    z = np.moveaxis(logits.detach().double().numpy(), 1, -1).reshape(-1, logits.shape[1])
    t = targets.numpy().astype(np.int64).reshape(-1)
    z, t = z[t != IGNORE], t[t != IGNORE]
    if t.size == 0:
        return 0.0
    top = z.max(1, keepdims=True)
    losses = np.log(np.exp(z - top).sum(1)) + top[:, 0] - z[np.arange(t.size), t]
    losses = np.sort(losses)[::-1]
    keep = max(1, math.floor(share * t.size))
    hard = losses[losses > -math.log(threshold)]
    return hard.mean() if hard.size >= keep else losses[:keep].mean()


def reference_details(targets, classes, threshold=1):
    """Compute the paper's pyramid: the weighted sum of Laplacians of one-hot masks with three strides."""
    t = targets.long()
    kernel = -torch.ones(classes, 1, 3, 3, dtype=torch.float64)
    kernel[:, :, 1, 1] = 8
    masks = torch.stack([(t == c).double() for c in range(classes)], dim=1)
    maps = []
    for stride in (1, 2, 4):
        found = F.conv2d(masks, kernel, stride=stride, padding=1, groups=classes).amax(1, keepdim=True)
        maps.append(F.interpolate((found >= threshold).double(), size=t.shape[-2:], mode="nearest"))
    return 0.6 * maps[0] + 0.3 * maps[1] + 0.1 * maps[2] >= 0.3 - 1e-9


def reference_detail_loss(logits, details):
    z, t = logits.detach().double().numpy(), details.double().numpy()
    p = 1 / (1 + np.exp(-z))
    bce = -(t * np.log(p) + (1 - t) * np.log(1 - p)).mean()
    return bce + 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def labels(seed, size=(2, 8, 12), classes=5, ignored=0.3, blocks=1, dtype=torch.uint8):
    """Return class ids in uniform blocks, with a fraction `ignored` of the pixels ignored."""
    generator = torch.Generator().manual_seed(seed)
    n, height, width = size
    coarse = torch.randint(0, classes, (n, height // blocks, width // blocks), generator=generator)
    targets = coarse.repeat_interleave(blocks, 1).repeat_interleave(blocks, 2)
    targets[torch.rand(targets.shape, generator=generator) < ignored] = IGNORE
    return targets.to(dtype)


def scores(seed, channels=5, size=(2, 8, 12), scale=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed + 1)
    n, height, width = size
    drawn = torch.randn(n, channels, height, width, generator=generator, dtype=torch.float64)
    return (scale * drawn).to(dtype).requires_grad_()


def stdc_batch(seed=0, **options):
    outputs = tuple(scores(seed + i, channels) for i, channels in enumerate((5, 5, 5, 1)))
    return outputs, labels(seed, **options)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.floats(0, 1.1),
    st.sampled_from(SHARES),
    st.sampled_from([0.05, 0.5, 0.7, 1.0]),
    st.sampled_from([0.0, 0.1, 1.0, 8.0]),  # 0: all pixels tie; 8: few pixels are hard
    st.booleans(),
    st.sampled_from([torch.uint8, torch.int32, torch.int64]),
)
def test_ohem_loss_matches_a_sorted_and_masked_reference(
    seed, ignored, share, threshold, scale, rounded, dtype
):
    targets = labels(seed, ignored=ignored, dtype=dtype)
    logits = scores(seed, scale=scale, dtype=torch.float64).detach()
    logits = logits.round() if rounded else logits  # create ties
    loss = OhemCELoss(threshold, share, IGNORE)(logits, targets)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(
        reference_ohem(logits, targets, threshold, share), rel=1e-9, abs=1e-12
    )


def test_tied_pixels_have_equal_weights():
    logits = torch.zeros(1, 2, 1, 16, dtype=torch.float64)
    logits[0, 0, 0] = torch.tensor([-1.0] + [0.0] * 6 + [3.0] * 9)
    logits.requires_grad_()
    loss = OhemCELoss(0.1, 0.25, IGNORE)(logits, torch.zeros(1, 1, 16, dtype=torch.long))
    # Four pixels are kept: the hardest one and three of the next six, which tie.
    assert loss.item() == pytest.approx((math.log(1 + math.e) + 3 * math.log(2)) / 4, rel=1e-12)
    loss.backward()
    hardest = -1 / (1 + math.exp(-1)) / 4
    expected = torch.tensor([hardest] + [-0.5 * 3 / 6 / 4] * 6 + [0.0] * 9, dtype=torch.float64)
    torch.testing.assert_close(logits.grad[0, 0, 0], expected, rtol=1e-9, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([(1, 4, 4), (2, 8, 12), (1, 16, 8)]),
    st.sampled_from([1, 2, 4]),
    st.floats(0, 1.1),
    st.sampled_from([torch.uint8, torch.int64]),
    st.sampled_from([1, 2.5, 8]),
)
def test_details_match_the_pyramid_of_laplacians(seed, size, blocks, ignored, dtype, threshold):
    targets = labels(seed, size, blocks=blocks, ignored=ignored, dtype=dtype)
    assert torch.equal(detail_target(targets, IGNORE, threshold), reference_details(targets, 5, threshold))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.floats(0, 1.1), st.lists(st.floats(0, 3), min_size=4, max_size=4))
def test_stdc_loss_matches_its_float64_reference(seed, ignored, weights):
    outputs, targets = stdc_batch(seed, ignored=ignored)
    losses = STDCLoss(5, tuple(weights), ignore_index=IGNORE)(outputs, targets)
    assert list(losses) == ["loss_main", "loss_aux0", "loss_aux1", "loss_detail"]
    expected = [reference_ohem(logits, targets) for logits in outputs[:3]]
    expected.append(reference_detail_loss(outputs[3], reference_details(targets, 5)))
    for loss, weight, value in zip(losses.values(), weights, expected, strict=True):
        assert loss.item() == pytest.approx(weight * value, rel=1e-5, abs=1e-6)


def test_each_detail_head_has_a_weighted_loss():
    outputs, targets = stdc_batch()
    outputs = (*outputs, scores(9, 1))
    weights, parts = (1.0, 0.6, 0.4, 1.0, 0.5), {}
    for pair in ((1.0, 0.0), (0.0, 1.0), (2.0, 3.0)):
        options = dict(num_detail_heads=2, detail_weights=pair, detail_threshold=3)
        parts[pair] = STDCLoss(5, weights, ignore_index=IGNORE, **options)(outputs, targets)
    details = reference_details(targets, 5, 3)
    for name, weight, logits in zip(("loss_detail0", "loss_detail1"), weights[3:], outputs[3:], strict=True):
        whole = sum(parts[pair][name] for pair in ((1.0, 0.0), (0.0, 1.0))).item()
        assert whole == pytest.approx(weight * reference_detail_loss(logits, details), rel=1e-5)
        mixed = 2 * parts[1.0, 0.0][name] + 3 * parts[0.0, 1.0][name]
        torch.testing.assert_close(parts[2.0, 3.0][name], mixed)


@pytest.mark.slow
def test_inductor_keeps_all_gradients():
    """On CPU, inductor dropped gradients that it converted to scatters. See `layers.resize`."""
    outputs, targets = stdc_batch()
    loss = STDCLoss(ignore_index=IGNORE)

    def result(function):
        return torch.autograd.grad(sum(function(outputs, targets).values()), outputs)

    torch.testing.assert_close(result(torch.compile(loss, fullgraph=True, dynamic=False)), result(loss))


@pytest.mark.parametrize("count", [2, 3, 5])
def test_number_of_outputs_must_match_number_of_weights(count):
    outputs, targets = stdc_batch()
    with pytest.raises(ModelError, match=rf"one weight per network output \({count}\), but `weights` has 4"):
        STDCLoss(ignore_index=IGNORE)((outputs * 2)[:count], targets)
