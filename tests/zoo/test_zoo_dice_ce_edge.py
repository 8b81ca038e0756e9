from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from slipstream.zoo.dice_ce_edge import DiceCEEdgeLoss

CLASSES, IGNORE = 4, 9


def reference_edges(targets, kernel):
    """Return the pixels whose neighborhood in the map of any class contains both 0 and 1. Borders are replicated."""
    radius = kernel // 2
    edges = torch.zeros(targets.shape, dtype=torch.bool)
    for c in range(CLASSES):
        maps = (targets == c).double().unsqueeze(1)
        windows = F.pad(maps, [radius] * 4, mode="replicate").unfold(2, kernel, 1).unfold(3, kernel, 1)
        edges |= (windows.amax((-1, -2)) != windows.amin((-1, -2))).squeeze(1)
    return edges


def reference_dice(p, truth):
    return 1 - (2 * p[truth].sum() + 1) / (p.sum() + truth.sum() + 1 + 1e-5)


def reference(logits, targets, kernel, dice_ce, ce_edge):
    """Compute the loss of one head in float64 with boolean masks and a loop over classes."""
    logits, valid = logits.detach().double(), targets != IGNORE
    edges = reference_edges(targets, kernel)
    if logits.shape[1] == 1:
        p = logits.sigmoid()[:, 0]
        ce = -torch.where(edges, p, 1 - p).log().mean()
        return dice_ce[0] * ce + dice_ce[1] * reference_dice(p, edges)
    p = logits.exp() / logits.exp().sum(1, keepdim=True)
    ce = torch.zeros(targets.shape, dtype=torch.float64)
    ce[valid] = -p.movedim(1, -1)[valid].gather(1, targets[valid].long()[:, None]).squeeze(1).log()
    at_edges = ce[edges].mean() if edges.any() else 0.0
    dice = [reference_dice(p[:, c][valid], targets[valid] == c) for c in range(CLASSES)]
    total = ce_edge[0] * ce.mean() + ce_edge[1] * at_edges
    return dice_ce[0] * total + dice_ce[1] * sum(dice) / CLASSES


def batch(seed=0, heads=2, blob=3, size=(8, 11), dtype=torch.float32):
    """Return logits and targets with uniform blocks of `blob` x `blob` pixels, some of them ignored."""
    torch.manual_seed(seed)
    outputs = tuple(torch.randn(2, CLASSES, *size, dtype=dtype, requires_grad=True) for _ in range(heads))
    coarse = torch.randint(0, CLASSES + 1, (2, size[0] // blob + 1, size[1] // blob + 1))
    targets = coarse.repeat_interleave(blob, 1).repeat_interleave(blob, 2)[:, : size[0], : size[1]]
    return outputs, torch.where(targets == CLASSES, IGNORE, targets)


def loss_of(aux=1, detail=0, **options):
    options = {"weights": (1, 0.4, 0.3, 0.2)[: 1 + aux + detail], "edge_kernel": 5, **options}
    return DiceCEEdgeLoss(CLASSES, aux, detail, ignore_index=IGNORE, **options)


pairs = st.lists(st.floats(0, 2), min_size=2, max_size=2)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    blob=st.integers(1, 12),
    kernel=st.sampled_from([1, 3, 5]),
    dtype=st.sampled_from([torch.uint8, torch.int32, torch.int64]),
    dice_ce=pairs,
    ce_edge=pairs,
)
def test_loss_matches_the_float64_reference_with_boolean_masks(seed, blob, kernel, dtype, dice_ce, ce_edge):
    outputs, targets = batch(seed, blob=blob)
    loss = loss_of(edge_kernel=kernel, dice_ce_weights=dice_ce, ce_edge_weights=ce_edge)
    losses = loss(outputs, targets.to(dtype))
    assert list(losses) == ["loss_main", "loss_aux0"]
    for value, weight, logits in zip(losses.values(), (1, 0.4), outputs, strict=True):
        expected = weight * float(reference(logits, targets, kernel, dice_ce, ce_edge))
        assert value.shape == ()
        assert value.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_batch_of_ignored_pixels_has_finite_loss_and_zero_gradient():
    outputs, targets = batch()
    losses = loss_of()(outputs, torch.full_like(targets, IGNORE))
    # In this case, the Dice loss of each class is 1 - 1 / (1 + 1e-5).
    assert losses["loss_main"].item() == pytest.approx(1e-5, rel=0.02)
    sum(losses.values()).backward()
    assert all((logits.grad == 0).all() for logits in outputs)


def test_detail_heads_are_trained_on_edges():
    outputs, targets = batch(heads=2)
    detail = torch.randn(2, 1, 8, 11)
    losses = loss_of(aux=1, detail=1, dice_ce_weights=(0.7, 1.3))((*outputs, detail), targets)
    assert list(losses) == ["loss_main", "loss_aux0", "loss_detail0"]
    expected = 0.3 * float(reference(detail, targets, 5, (0.7, 1.3), (0.5, 0.5)))
    assert losses["loss_detail0"].item() == pytest.approx(expected, rel=1e-5)
