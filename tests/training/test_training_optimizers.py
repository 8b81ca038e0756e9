"""Tests of learning rates by prefix and weight decay by parameter type, in eager mode and in the step graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.utils import counters

from slipstream.hooks import Hook
from slipstream.model import BaseModel
from slipstream.optim import OptimWrapper, build_optim_wrapper
from slipstream.step.graph import GraphStep
from slipstream.training.optimizers import optim_wrapper
from slipstream.training.params import TrainingParams
from slipstream.training.schedules import lr_schedules
from tiny_runs import run


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.stem_extra = nn.Linear(4, 4)


class Network(nn.Module):
    """A network with overlapping prefixes, three types of norm layers, and two parameters outside of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Sequential(nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.Linear(4, 3, bias=False))
        self.scale = nn.Parameter(torch.ones(3))
        self.bias = nn.Parameter(torch.zeros(3))


class Wrapped(BaseModel):
    """A model that wraps the user's network like `SupervisedModel`, with a loss that has a parameter."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.loss = nn.Bilinear(1, 1, 1, bias=False)


def build(model: nn.Module, **keys: Any) -> OptimWrapper:
    return build_optim_wrapper(model, optim_wrapper(TrainingParams.read({"max_epochs": 1, **keys})))


def options(model: nn.Module, wrapper: OptimWrapper, key: str) -> dict[str, Any]:
    """Return the value of `key` in each parameter's group, by name. Check that no parameter is in two groups."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = [(names[id(p)], group[key]) for group in wrapper.param_groups for p in group["params"]]
    assert len(found) == len(dict(found))
    return dict(found)


@settings(max_examples=60, deadline=None)
@given(
    prefixes=st.sets(
        st.sampled_from(["backbone", "backbone.stem", "backbone.stem.0", "head.2", "sc", "bias"])
    ),
    wrapped=st.booleans(),
    spared=st.booleans(),
)
def test_parameters_have_the_rate_of_their_longest_prefix_and_the_decay_of_their_kind(
    prefixes: set[str], wrapped: bool, spared: bool
) -> None:
    model = Wrapped(Network()) if wrapped else Network()
    rates = {"default": 1.0, **{prefix: 0.5**number for number, prefix in enumerate(sorted(prefixes), 1)}}
    wrapper = build(
        model,
        initial_lr=rates,
        zero_weight_decay_on_bias_and_bn=spared,
        optimizer_params={"weight_decay": 0.3},
    )
    lr, decay = options(model, wrapper, "lr"), options(model, wrapper, "weight_decay")
    assert lr.keys() == decay.keys() == dict(model.named_parameters()).keys()
    for name in lr:
        own = name.removeprefix("network.")
        fitting = [prefix for prefix in prefixes if own[: len(prefix)] == prefix]
        assert lr[name] == rates[sorted(fitting, key=len)[-1] if fitting else "default"]
        kind = type(model.get_submodule(name.rpartition(".")[0]))
        bare = name.split(".")[-1] == "bias" or kind in (nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)
        assert decay[name] == (0.0 if spared and bare else 0.3)
    assert len(wrapper.param_groups) == len({(lr[name], decay[name]) for name in lr})


# ---- optimizers --------------------------------------------------------------------------------------------


# ---- training ----------------------------------------------------------------------------------------------


class Net(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, inputs: Tensor, targets: Tensor, mode: str) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.network(inputs), targets)}


@pytest.mark.parametrize("compile", [None, {"scope": "step", "backend": "eager"}])
def test_rates_decays_and_schedule_apply_in_eager_mode_and_in_the_step_graph(
    tmp_path: Path, compile: Any
) -> None:
    torch._dynamo.reset()
    counters.clear()
    rates = {"0": 0.01, "default": 0.1}
    keys = {"lr_mode": "PolyLRScheduler", "lr_warmup_epochs": 1, "zero_weight_decay_on_bias_and_bn": True}
    keys |= {"initial_lr": rates, "max_epochs": 3, "optimizer_params": {"weight_decay": 0.1, "momentum": 0.9}}
    params = TrainingParams.read(keys)
    batches: list[Any] = []
    runner = run(
        tmp_path,
        model=Net(),
        optim_wrapper=optim_wrapper(params),
        param_scheduler=lr_schedules(params),
        train_cfg=dict(by_epoch=True, max_epochs=3),
        custom_hooks=[_Batches(batches)],
        speed=dict(compile=compile),
    )
    assert (type(runner.step) is GraphStep) == (compile is not None)
    if compile:
        assert runner.step.uses_graph
        assert counters["stats"]["unique_graphs"] == 1
    expected = _by_hand(batches, rates)
    for name, value in expected.items():
        torch.testing.assert_close(runner.model.state_dict()[name], value, rtol=1e-4, atol=1e-6)


class _Batches(Hook):
    def __init__(self, kept: list[Any]) -> None:
        self.kept = kept

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self.kept.append([tensor.clone() for tensor in data_batch])


def _by_hand(batches: list[Any], rates: dict[str, float]) -> dict[str, Tensor]:
    """Train with hand-written SGD, using the learning rate and weight decay that the keys set for each parameter."""
    net = Net()
    momenta = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for step, (inputs, targets) in enumerate(batches):
        factor = 0.5 if step < 5 else (1 - max(step - 6, 0) / 10) ** 0.9
        gradients = torch.autograd.grad(net(inputs, targets, "loss")["loss"], list(net.parameters()))
        with torch.no_grad():
            for (name, p), gradient in zip(net.named_parameters(), gradients, strict=True):
                rate = rates["0" if name.startswith("network.0") else "default"] * factor
                decays = name in ("network.0.weight", "network.3.weight")
                momenta[name].mul_(0.9).add_(gradient + (0.1 * p if decays else 0))
                p -= rate * momenta[name]
    return net.state_dict()
