"""Tests of the assignment of parameters to groups, and of error messages for invalid configurations."""

import math

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from slipstream.errors import ConfigError, ModelError
from slipstream.optim.constructor import DefaultOptimWrapperConstructor, build_optim_wrapper
from slipstream.registry import OPTIM_WRAPPER_CONSTRUCTORS

LR, DECAY = 0.1, 0.01


class Wrapper:
    def __init__(self, optimizer: Optimizer, clip_grad=None):
        self.optimizer = optimizer
        self.clip_grad = clip_grad


class DeformConv2d(nn.Module):
    """A stand-in for the class of torchvision or mmcv. The constructor recognizes the class by its name."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2, 3, 3))
        self.bias = nn.Parameter(torch.zeros(2))
        self.conv_offset = nn.Conv2d(2, 18, 3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.ModuleDict(
            {"conv": nn.Conv2d(3, 4, 1), "depthwise": nn.Conv2d(4, 4, 3, groups=4), "bn": nn.BatchNorm2d(4)}
        )
        self.head = nn.ModuleDict({"fc": nn.Linear(4, 2), "ln": nn.LayerNorm(2), "dcn": DeformConv2d()})
        self.scale = nn.Parameter(torch.ones(3))


def config(paramwise=None, wrapper=Wrapper, **optimizer):
    optimizer = {"type": "SGD", "lr": LR, "weight_decay": DECAY, **optimizer}
    return {"type": wrapper, "optimizer": optimizer, "paramwise_cfg": paramwise}


def build(model, paramwise=None, **optimizer):
    return build_optim_wrapper(model, config(paramwise, **optimizer)).optimizer


def options_by_name(model, optimizer, *keys):
    """Return {parameter name: (option, ...)}. Check that no parameter is in two groups."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            assert names[id(p)] not in found
            found[names[id(p)]] = tuple(group[key] for key in keys)
    return found


def expect(model, changed, default):
    """Return {parameter name: changed.get(name, default)}, with values for approximate comparison."""
    return {name: pytest.approx(changed.get(name, default)) for name, _ in model.named_parameters()}


def test_multipliers_match_mmengine():
    model = Net()
    rules = {
        "bias_lr_mult": 2.0,
        "bias_decay_mult": 0.0,
        "norm_decay_mult": 0.5,
        "flat_decay_mult": 0.25,
        "dwconv_decay_mult": 4.0,
        "dcn_offset_lr_mult": 0.1,
    }
    found = options_by_name(model, build(model, rules), "lr", "weight_decay")
    changed = {
        "scale": (LR, DECAY * 0.25),
        "backbone.conv.bias": (LR * 2, 0.0),
        "backbone.depthwise.weight": (LR, DECAY * 4),
        "backbone.depthwise.bias": (LR * 2, 0.0),
        "backbone.bn.weight": (LR, DECAY * 0.5),
        "backbone.bn.bias": (LR, DECAY * 0.5),
        "head.fc.bias": (LR * 2, 0.0),
        "head.ln.weight": (LR, DECAY * 0.5),
        "head.ln.bias": (LR, DECAY * 0.5),
        "head.dcn.bias": (LR * 2, 0.0),
        "head.dcn.conv_offset.weight": (LR * 0.1, DECAY),
        "head.dcn.conv_offset.bias": (LR * 0.1, DECAY),
    }
    assert found == expect(model, changed, (LR, DECAY))


def test_longest_custom_key_replaces_all_other_options():
    model = Net()
    rules = {
        "bias_decay_mult": 0.0,
        "custom_keys": {
            "backbone": {"lr_mult": 0.1},
            "backbone.bn": {"decay_mult": 0.5, "momentum": 0.7},
            "head": {"lr_mult": 3, "decay_mult": 0},
            "scale": {"lr": 0.9},
        },
    }
    found = options_by_name(model, build(model, rules), "lr", "weight_decay", "momentum")
    changed = {"scale": (0.9, DECAY, 0.0)}
    for name, _ in model.named_parameters():
        if name.startswith("backbone.bn"):
            changed[name] = (LR, DECAY * 0.5, 0.7)
        elif name.startswith("backbone"):
            changed[name] = (LR * 0.1, DECAY, 0.0)
        elif name.startswith("head"):
            changed[name] = (LR * 3, 0.0, 0.0)
    assert found == expect(model, changed, None)


# ---- frozen and shared parameters ---------------------------------------------------------------


def test_frozen_parameters_have_their_options_so_that_they_can_be_trained_later():
    model = Net()
    model.backbone.requires_grad_(False)
    model.codes = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    optimizer = build(model, {"custom_keys": {"backbone": {"lr_mult": 0.1}}})
    found = options_by_name(model, optimizer, "lr")
    assert set(found) == {name for name, _ in model.named_parameters()} - {"codes"}
    assert len({lr for name, lr in found.items() if name.startswith("backbone")}) == 1
    assert len(optimizer.param_groups) == 2


def tied():
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)})
    model["second"].weight = model["first"].weight
    return model


def test_shared_parameter_with_equal_options_is_in_the_optimizer_once():
    model = tied()
    optimizer = build(model, {"bias_decay_mult": 0.0})
    assert len(options_by_name(model, optimizer)) == 3


def test_shared_parameter_with_different_options_raises_an_error_unless_bypassed():
    model = tied()
    rules = {"custom_keys": {"second": {"lr_mult": 0.1}}}
    with pytest.raises(ModelError, match=r"'first.weight' occurs twice in the model.*bypass_duplicate=True"):
        build(model, rules)
    found = options_by_name(model, build(model, {**rules, "bypass_duplicate": True}), "lr")
    assert found["first.weight"] == (LR,)
    assert found["second.bias"] == pytest.approx((LR * 0.1,))


# ---- wrapped models, wrappers, constructors -----------------------------------------------------


class LayerDecay(DefaultOptimWrapperConstructor):
    """A constructor that adds complete groups with additional keys, like OpenMMLab's layer-decay constructors."""

    def add_params(self, params, module, **kwargs):
        for depth, (name, child) in enumerate(module.named_children()):
            lr = self.base_lr * self.paramwise_cfg["decay_rate"] ** depth
            params.append({"params": list(child.parameters()), "lr": lr, "group_name": name})


def test_custom_constructor_sets_options(monkeypatch):
    monkeypatch.setitem(OPTIM_WRAPPER_CONSTRUCTORS.module_dict, "LayerDecay", LayerDecay)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    cfg = {**config({"decay_rate": 0.5}), "constructor": "LayerDecay"}
    groups = build_optim_wrapper(model, cfg).optimizer.param_groups
    assert [(g["lr"], g["group_name"], len(g["params"])) for g in groups] == [(LR, "0", 2), (LR / 2, "1", 2)]


# ---- invalid input ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"bias_lr_mul": 1}, "paramwise_cfg.bias_lr_mul: no such option; did you mean 'bias_lr_mult'"),
        ({"bias_lr_mult": "2"}, "paramwise_cfg.bias_lr_mult: must be a float of at least 0 or None, not '2'"),
        ({"bias_decay_mult": math.nan}, "paramwise_cfg.bias_decay_mult: must be a float of at least 0"),
        ({"norm_decay_mult": -1}, "paramwise_cfg.norm_decay_mult: must be a float of at least 0"),
        ({"bypass_duplicate": 1}, "bypass_duplicate: must be a bool"),
        ({"custom_keys": ["head"]}, "custom_keys: must be a dict"),
        ({"custom_keys": {"head": 0.1}}, r"custom_keys: must be a dict\[str, dict.* not {'head': 0.1}"),
        (
            {"custom_keys": {"head": {"lr_mult": -1}}},
            r"^paramwise_cfg\.custom_keys\.head\.lr_mult: .* not -1",
        ),
        ({"custom_keys": {"head": {"decay_mult": True}}}, r"custom_keys\.head\.decay_mult: .* not True"),
        (
            {"custom_keys": {"backbone.conv": {"lr_mult": "2"}}},
            r"custom_keys\['backbone.conv'\].lr_mult: .* not '2'",
        ),
        ({"custom_keys": {"backbon.": {"lr_mult": 0.1}}}, "no parameter name contains 'backbon.'"),
        ({"custom_keys": {"head": {"lr_mul": 0.1}}}, "SGD has no option 'lr_mul'; did you mean 'lr_mult'"),
        ({"custom_keys": {"head": {"betas": (0, 0)}}}, r"custom_keys\.head: SGD has no option"),
    ],
)
def test_invalid_paramwise_cfg_raises_an_error(rules, message):
    with pytest.raises(ConfigError, match=message):
        build(Net(), rules)


@pytest.mark.parametrize("name", ["Fromage", "Nero", "SGD"])
def test_a_license_that_forbids_commercial_use_is_logged(name, caplog):
    if name != "SGD":
        pytest.importorskip("pytorch_optimizer")
    build_optim_wrapper(nn.Linear(2, 2), dict(optimizer=dict(type=name, lr=0.1)))
    assert ("forbids commercial use" in caplog.text) == (name != "SGD")
