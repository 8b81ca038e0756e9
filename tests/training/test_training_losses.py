import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from slipstream.registry import MODELS
from slipstream.training.losses import loss_config
from slipstream.zoo import CrossEntropy, DiceCEEdgeLoss, STDCLoss

CITYSCAPES = dict(num_classes=19, ignore_index=19, num_aux_heads=3, num_detail_heads=0, edge_kernel=5)


def build(loss, criterion_params=None):
    return MODELS.build(loss_config(loss, criterion_params))


@pytest.mark.parametrize(
    ("loss", "params", "kind"),
    [
        ("CrossEntropyLoss", {}, CrossEntropy),
        ("cross_entropy", {"ignore_index": 19}, CrossEntropy),
        ({"DiceCEEdgeLoss": CITYSCAPES}, {}, DiceCEEdgeLoss),
        (
            {"dice_ce_edge_loss": {**CITYSCAPES, "num_aux_heads": 1, "weights": [1.0, 0.4]}},
            None,
            DiceCEEdgeLoss,
        ),
        ({"stdc_loss": {"num_classes": 19, "ignore_index": 19, "mining_percent": 0.0625}}, {}, STDCLoss),
        ({"STDCLoss": {"num_classes": 19}}, {}, STDCLoss),
        ({"_target_": "super_gradients.training.losses.STDCLoss", "num_classes": 19}, {}, STDCLoss),
        ("mse", {}, nn.MSELoss),
        ("BCEWithLogitsLoss", {}, nn.BCEWithLogitsLoss),
    ],
)
def test_old_and_new_names_build_the_loss(loss, params, kind):
    assert type(build(loss, params)) is kind


# ---- cross-entropy -------------------------------------------------------------------------------------


def plain_cross_entropy(logits, targets, smoothing, weight, ignored):
    """Return the weighted mean over the samples that are not ignored, computed in a loop."""
    log_p = (
        (logits.double() - logits.double().logsumexp(1, keepdim=True))
        .movedim(1, -1)
        .reshape(-1, logits.shape[1])
    )
    total, weight_sum = 0.0, 0.0
    for row, target in zip(log_p, targets.reshape(-1).tolist(), strict=True):
        if target != ignored:
            total -= (1 - smoothing) * weight[target] * row[target].item()
            total -= smoothing * (torch.tensor(weight).double() * row).mean().item()
            weight_sum += weight[target]
    return total / weight_sum if weight_sum else 0.0


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([(), (3, 4)]),
    st.sampled_from([0.0, 0.1]),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([torch.uint8, torch.int64]),
)
def test_cross_entropy_matches_a_plain_loop_in_float64(seed, size, smoothing, weighted, ignored, dtype):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 3, *size, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 3, (5, *size), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < ignored] = 9
    weight = torch.rand(3, generator=generator).add(0.1).tolist() if weighted else None
    loss = CrossEntropy(9, smoothing, weight).double()(logits, targets.to(dtype))
    expected = plain_cross_entropy(logits.detach(), targets, smoothing, weight or [1.0] * 3, 9)
    assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-12)
    loss.backward()
    assert logits.grad.isfinite().all()
    if ignored == 1.0:
        assert not logits.grad.any()


@pytest.mark.parametrize("weight", [None, [1.0, 2.0, 3.0]])
def test_cross_entropy_compiles_to_one_graph(weight):
    loss = CrossEntropy(9, 0.1, weight)
    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    logits, targets = torch.randn(2, 3, 4, 4), torch.tensor([0, 1, 2, 9]).repeat(2, 4, 1)
    torch.testing.assert_close(compiled(logits, targets), loss(logits, targets))
