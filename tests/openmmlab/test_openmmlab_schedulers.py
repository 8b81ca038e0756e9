"""Schedulers restore the saved arguments, and parameter groups have the format of MMEngine's optimizer state."""

from collections import Counter

import pytest
import torch
from mmengine.optim import (
    DefaultOptimWrapperConstructor,
    LinearLR,
    MultiStepLR,
    build_optim_wrapper,
)
from torch import nn


def optimizer(lr=1.0):
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=lr)


def rates(optim, scheduler, steps):
    found = []
    for _ in range(steps):
        scheduler.step()
        found.append(optim.param_groups[0]["lr"])
    return found


def test_a_resumed_scheduler_continues_with_the_saved_arguments():
    optim = optimizer()
    saved = MultiStepLR(optim, milestones=[3, 5], gamma=0.1)
    saved.step()
    state = saved.state_dict()
    resumed = MultiStepLR(second := optimizer(), milestones=[2], gamma=0.5, begin=1, by_epoch=False)
    second.load_state_dict(optim.state_dict())
    resumed.load_state_dict(state)
    assert rates(second, resumed, 5) == pytest.approx([1, 0.1, 0.1, 0.01, 0.01])
    assert (resumed.milestones, resumed.gamma) == (Counter([3, 5]), 0.1)
    assert (resumed.begin, resumed.by_epoch) == (0, True)


def test_values_computed_from_the_arguments_follow_the_saved_ones():
    optim = optimizer()
    state = LinearLR(optim, start_factor=0.5, end=5).state_dict()
    resumed = LinearLR(second := optimizer(), start_factor=0.1, end=101)
    assert resumed.total_iters == 100
    second.load_state_dict(optim.state_dict())
    resumed.load_state_dict(state)
    assert resumed.total_iters == 4
    # 0.5 to 1 in 4 steps, and then constant
    assert rates(second, resumed, 6) == pytest.approx([0.625, 0.75, 0.875, 1, 1, 1])


def test_an_mmengine_state_restores_the_arguments():
    optim = optimizer(lr=0.5)
    optim.param_groups[0]["initial_lr"] = 1.0
    scheduler = MultiStepLR(optim, milestones=[9], gamma=0.9)
    # The attributes of MMEngine's scheduler after two steps. The milestone at step 1 has halved the rate.
    state = {
        "milestones": Counter({1: 1, 3: 2}),
        "gamma": 0.5,
        "param_name": "lr",
        "begin": 0,
        "end": 10**9,
        "by_epoch": True,
        "base_values": [1.0],
        "last_step": 2,
        "_global_step": 3,
        "verbose": False,
        "_last_value": [0.5],
    }
    scheduler.load_state_dict(state)
    assert rates(optim, scheduler, 2) == pytest.approx([0.125, 0.125])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.head = nn.Linear(4, 2)
        self.backbone[0].bias.requires_grad = False


CFG = dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9, weight_decay=0.01))
PARAMWISE = dict(
    norm_decay_mult=0.0, bias_lr_mult=2.0, custom_keys={"head": dict(lr_mult=0.5), "nothing": {}}
)


def test_each_parameter_has_its_own_group_in_the_order_of_the_model():
    model = Net()
    wrapper = build_optim_wrapper(model, {**CFG, "paramwise_cfg": PARAMWISE})
    named = dict(model.named_parameters())
    # Computed by hand. The frozen bias has no group, and the custom key `head` replaces all other multipliers.
    expected = [
        ("scale", 0.1, 0.01),
        ("backbone.0.weight", 0.1, 0.01),
        ("backbone.1.weight", 0.1, 0.0),
        ("backbone.1.bias", 0.1, 0.0),
        ("head.weight", 0.05, 0.01),
        ("head.bias", 0.05, 0.01),
    ]
    groups = wrapper.optimizer.param_groups
    assert [(g["lr"], g["weight_decay"]) for g in groups] == [
        pytest.approx((lr, wd)) for _, lr, wd in expected
    ]
    assert [g["params"] for g in groups] == [[named[name]] for name, _, _ in expected]
    assert [g.get("lr_mult") for g in groups] == [None] * 4 + [0.5] * 2


def test_without_options_one_group_contains_all_parameters():
    model = Net()
    groups = build_optim_wrapper(model, CFG).optimizer.param_groups
    assert [len(g["params"]) for g in groups] == [7]
    assert all(a is b for a, b in zip(groups[0]["params"], model.parameters(), strict=True))


def test_a_repeated_parameter_has_one_group():
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    constructor = DefaultOptimWrapperConstructor(
        CFG, dict(custom_keys={"b": dict(lr_mult=2.0)}, bypass_duplicate=True)
    )
    groups = constructor(model).optimizer.param_groups
    assert [(len(g["params"]), g["lr"]) for g in groups] == [(1, 0.1)]
