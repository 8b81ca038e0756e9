import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from slipstream.errors import BuildError, ConfigError, ModelError, UnknownNameError
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


def test_inline_arguments_override_criterion_params():
    assert build("CrossEntropyLoss", {"ignore_index": 19}).ignore_index == 19
    loss = build({"CrossEntropyLoss": {"ignore_index": 7}}, {"ignore_index": 19, "smooth_eps": 0.1})
    assert (loss.ignore_index, loss.label_smoothing) == (7, 0.1)


def test_stdc_loss_has_the_supergradients_defaults():
    loss = build({"STDCLoss": {"num_classes": 5, "learnable_fusing_kernel": False, "ohem_criteria": None}})
    assert loss.weights == (1, 1, 1, 1)
    assert (loss.ohem.mining_percent, loss.ignore_index, loss.detail_threshold) == (0.1, -100, 1)
    assert loss.ohem.hard_loss == pytest.approx(-torch.tensor(0.7).log().item())
    several = build({"STDCLoss": {"num_aux_heads": 1, "num_detail_heads": 2, "detail_weights": [1, 0.5]}})
    assert (len(several.weights), several.num_detail_heads, several.detail_weights) == (4, 2, (1, 0.5))


def test_modules_and_functions_are_returned_unchanged():
    module = nn.L1Loss()
    assert loss_config(module) is module
    assert loss_config(F.cross_entropy, {}) is F.cross_entropy
    with pytest.raises(ConfigError, match="only applies to a loss given by name"):
        loss_config(module, {"reduction": "sum"})


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (None, "a loss is required"),
        (3, "not 3"),
        ({"A": {}, "B": {}}, "must be a name"),
        ({"STDCLoss": {"weights": [1, 1]}}, r"must be 4 numbers.* not \[1, 1\]"),
        ({"STDCLoss": {"ohem_criteria": "OhemBCELoss"}}, "must be None, not"),
        ({"CrossEntropyLoss": {"reduction": "sum"}}, "must be 'mean', not"),
    ],
)
def test_invalid_loss_raises_an_error_with_config_path(loss, message):
    with pytest.raises(ConfigError, match=message) as error:
        loss_config(loss)
    assert error.value.path.startswith("training_params.loss")


def test_unknown_name_or_argument_error_suggests_the_nearest():
    with pytest.raises(
        UnknownNameError, match="no loss is named 'DiceEdgeLoss'; did you mean 'DiceCEEdgeLoss'"
    ):
        loss_config("DiceEdgeLoss")
    with pytest.raises(BuildError, match="no parameter 'ignore_label'; did you mean 'ignore_index'"):
        build("CrossEntropyLoss", {"ignore_label": 19})


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


def test_class_probabilities_are_valid_targets():
    logits, probabilities = torch.randn(4, 3), torch.rand(4, 3).softmax(1)
    torch.testing.assert_close(
        CrossEntropy(0)(logits, probabilities), -(probabilities * logits.log_softmax(1)).sum(1).mean()
    )


def test_half_precision_is_summed_in_float32():
    logits, targets = torch.randn(2, 3, 64, 64), torch.randint(0, 3, (2, 64, 64))
    loss = CrossEntropy()(logits.half(), targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(logits.half().float(), targets))


def test_several_outputs_and_invalid_smoothing_are_rejected():
    with pytest.raises(ModelError, match=r"network returns 2 in training.*use_aux_heads=False"):
        CrossEntropy()((torch.zeros(1, 3), torch.zeros(1, 3)), torch.zeros(1, dtype=torch.long))
    with pytest.raises(ConfigError, match=r"must be between 0 and 1, not 1\.5"):
        CrossEntropy(label_smoothing=1.5)


@pytest.mark.parametrize("weight", [None, [1.0, 2.0, 3.0]])
def test_cross_entropy_compiles_to_one_graph(weight):
    loss = CrossEntropy(9, 0.1, weight)
    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    logits, targets = torch.randn(2, 3, 4, 4), torch.tensor([0, 1, 2, 9]).repeat(2, 4, 1)
    torch.testing.assert_close(compiled(logits, targets), loss(logits, targets))
