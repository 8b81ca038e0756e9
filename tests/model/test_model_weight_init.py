import math

import numpy as np
import pytest
import torch
from torch import nn

from slipstream.checkpoint import save_checkpoint
from slipstream.model import BaseModule, ModuleList, Sequential
from slipstream.model.weight_init import initialize


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def conv(cfg):
    """Initialize a layer with 64 * 32 * 9 weights (fan_in 288, fan_out 576), and return its weights and bias."""
    layer = nn.Conv2d(32, 64, 3)
    initialize(layer, cfg)
    return layer.weight.detach().double().numpy().ravel(), layer.bias.detach().numpy()


FAN_IN, FAN_OUT = 32 * 9, 64 * 9


@pytest.mark.parametrize(
    ("cfg", "mean", "std"),
    [
        (dict(type="Normal", mean=0.5, std=0.1), 0.5, 0.1),
        (dict(type="Uniform", a=-1, b=3), 1.0, 4 / math.sqrt(12)),
        (dict(type="Xavier"), 0.0, math.sqrt(2 / (FAN_IN + FAN_OUT))),
        (dict(type="Xavier", gain=3, distribution="uniform"), 0.0, 3 * math.sqrt(2 / (FAN_IN + FAN_OUT))),
        (dict(type="Kaiming"), 0.0, math.sqrt(2 / FAN_OUT)),
        (dict(type="Kaiming", mode="fan_in", nonlinearity="linear"), 0.0, math.sqrt(1 / FAN_IN)),
        (dict(type="Kaiming", a=1, nonlinearity="leaky_relu"), 0.0, math.sqrt(1 / FAN_OUT)),
        (dict(type="Kaiming", distribution="uniform"), 0.0, math.sqrt(2 / FAN_OUT)),
        (dict(type="Caffe2Xavier"), 0.0, math.sqrt(1 / FAN_IN)),
    ],
)
def test_weights_have_the_moments_of_their_distribution(cfg, mean, std):
    values, bias = conv({**cfg, "bias": 0.25})
    n = len(values)
    assert abs(values.mean() - mean) < 5 * std / math.sqrt(n)
    assert abs(values.std() / std - 1) < 5 / math.sqrt(2 * n)
    assert np.all(bias == 0.25)


def test_constant_fills_weights_and_bias_prob_sets_the_bias():
    values, bias = conv(dict(type="Constant", val=0.3, bias=2.0))
    assert np.allclose(values, 0.3)
    assert np.all(bias == 2)
    _, bias = conv(dict(type="Constant", val=0.3, bias_prob=0.01))
    assert 1 / (1 + np.exp(-bias.astype(float))) == pytest.approx(0.01)


class Net(BaseModule):
    def __init__(self, init_cfg=None):
        super().__init__(init_cfg)
        self.feat = nn.Conv2d(3, 4, 1)
        self.norm = nn.BatchNorm2d(4)
        self.reg = nn.Conv2d(4, 2, 1)
        self.fc = nn.Linear(2, 2)


def values(module):
    """Return the value of each constant weight, and None for other weights."""
    firsts = {name: p.flatten()[0].item() for name, p in module.named_parameters() if name.endswith("weight")}
    return {
        name.removesuffix(".weight"): first if bool((module.get_parameter(name) == first).all()) else None
        for name, first in firsts.items()
    }


def test_layer_matches_class_and_base_class_names():
    net = Net(
        [dict(type="Constant", val=1, layer="Conv2d"), dict(type="Constant", val=2, layer=["_BatchNorm"])]
    )
    net.init_weights()
    found = values(net)
    assert (found["feat"], found["reg"], found["norm"], found["fc"]) == (1, 1, 2, None)


def test_override_applies_other_values_to_a_child():
    special = dict(type="Constant", name="reg", val=3, bias=4)
    net = Net(dict(type="Constant", val=1, bias=2, layer="Conv2d", override=special))
    net.init_weights()
    assert values(net)["feat"] == 1
    assert values(net)["reg"] == 3
    assert net.reg.bias.tolist() == [4, 4]
    assert net.feat.bias.tolist() == [2] * 4


def test_children_are_initialized_after_their_parent_and_only_once():
    net = Sequential(
        ModuleList([Net(dict(type="Constant", val=9))]),
        nn.Linear(2, 2),
        init_cfg=dict(type="Constant", val=1),
    )
    net.init_weights()
    assert net[1].weight.unique().tolist() == [1]
    assert set(values(net[0][0]).values()) == {9}
    nn.init.constant_(net[1].weight, 6)
    net.init_weights()
    assert net[1].weight.unique().tolist() == [6]
    assert net.is_init


def test_pretrained_weights_use_the_prefix_and_override_the_init_cfg_of_children(tmp_path):
    source = nn.ModuleDict({"backbone": nn.Sequential(nn.Linear(2, 2)), "head": nn.Linear(2, 1)})
    save_checkpoint({"state_dict": source.state_dict()}, tmp_path / "a.pth", print)

    pretrained = dict(type="Pretrained", checkpoint=str(tmp_path / "a.pth"))
    net = Sequential(nn.Linear(2, 2), init_cfg=pretrained | dict(prefix="backbone"))
    net.init_weights()
    assert torch.equal(net[0].weight, source["backbone"][0].weight)

    class Outer(BaseModule):
        def __init__(self):
            super().__init__(pretrained)
            self.backbone = Sequential(nn.Linear(2, 2), init_cfg=dict(type="Constant", val=0))
            self.head = nn.Linear(2, 1)

    outer = Outer()
    outer.init_weights()
    assert torch.equal(outer.backbone[0].weight, source["backbone"][0].weight)
    assert torch.equal(outer.head.bias, source["head"].bias)
