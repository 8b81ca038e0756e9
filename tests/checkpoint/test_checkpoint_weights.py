import pytest
import torch
from torch import nn

from slipstream.checkpoint import load_weights, revise
from slipstream.errors import CheckpointError


def model(classes=3):
    return nn.ModuleDict({"body": nn.Linear(2, 4), "head": nn.Linear(4, classes)})


def test_matching_weights_are_loaded_in_place_without_a_report():
    source, target = model(), model()
    places = [p.data_ptr() for p in target.parameters()]
    assert load_weights(target, source.state_dict(), strict=True) == []
    assert [p.data_ptr() for p in target.parameters()] == places
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))


def test_strict_error_lists_missing_and_unexpected_keys_and_keeps_the_model():
    state = model().state_dict()
    state["neck.weight"] = state.pop("head.bias")
    target = model()
    before = target["body"].weight.clone()
    with pytest.raises(CheckpointError, match=r"missing keys: head\.bias; unexpected keys: neck\.weight"):
        load_weights(target, state, strict=True, source="a.pth")
    assert torch.equal(target["body"].weight, before)
    with pytest.raises(CheckpointError, match=r"a different model: unexpected keys: neck\.weight"):
        load_weights(target, {**target.state_dict(), "neck.weight": torch.ones(1)}, strict=True)


def test_non_strict_loading_reports_mismatches():
    state = model().state_dict()
    state["neck.weight"] = state.pop("head.bias")
    target = model()
    bias = target["head"].bias.clone()
    lines = load_weights(target, state, strict=False)
    assert lines == ["missing keys: head.bias", "unexpected keys: neck.weight"]
    assert torch.equal(target["body"].weight, state["body.weight"])
    assert torch.equal(target["head"].bias, bias)


def test_non_strict_loading_skips_a_head_with_a_different_class_count():
    target, source = model(), model(5)
    head = target["head"].weight.clone()
    (line,) = load_weights(target, source.state_dict(), strict=False)
    assert "head.weight is (5, 4) in the checkpoint and (3, 4) in the model" in line
    assert torch.equal(target["head"].weight, head)
    assert torch.equal(target["body"].weight, source["body"].weight)


def test_non_strict_loading_fails_if_no_key_matches():
    state = {f"module.{key}": value for key, value in model().state_dict().items()}
    with pytest.raises(CheckpointError, match=r"none of this model's tensors.*module\.body.*revise_keys"):
        load_weights(model(), state, strict=False)
    assert load_weights(model(), revise(state, [(r"^module\.", "")]), strict=True) == []


class Renamed(nn.Module):
    """A module whose weight was formerly named `kernel`."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_load_state_dict_pre_hook(self.rename)

    @staticmethod
    def rename(module, state, prefix, *_):
        if f"{prefix}kernel" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")


def test_pre_hooks_rename_old_keys_before_the_strict_comparison():
    parts = nn.ModuleDict({"old": Renamed(), "new": Renamed()})
    state = {"old.kernel": torch.ones(2), "new.weight": torch.full((2,), 3.0)}
    assert load_weights(parts, state, strict=True) == []
    assert [parts[name].weight.tolist() for name in ("old", "new")] == [[1.0, 1.0], [3.0, 3.0]]
    assert sorted(state) == ["new.weight", "old.kernel"]
    with pytest.raises(CheckpointError, match=r"size mismatch for old\.weight"):
        load_weights(parts, {**state, "old.kernel": torch.ones(3)}, strict=True)


def test_revise_applies_patterns_in_order_and_keeps_its_argument():
    state = {"module.backbone.0.weight": 1, "head": 2}
    got = revise(state, [(r"^module\.", ""), (r"^backbone\.(\d+)", r"body.layer\1")])
    assert got == {"body.layer0.weight": 1, "head": 2}
    assert list(state) == ["module.backbone.0.weight", "head"]
