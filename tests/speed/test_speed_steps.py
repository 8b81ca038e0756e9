"""Tests of `build_step`: the kind of step that a plan selects, warnings, and results that match the eager step."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD

from slipstream.model.wrappers import MMDistributedDataParallel
from slipstream.model.wrappers.distributed import HalfPrecision, run_comm_hook
from slipstream.optim import OptimWrapper
from slipstream.speed import SpeedPlan
from slipstream.speed.graph_step import why_not_one_graph
from slipstream.speed.steps import StepSpec, build_step
from slipstream.step import sum_losses
from slipstream.step.graph import GraphStep

STEPS = 14


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


class Graphs:
    """A backend that runs graphs uncompiled and counts them."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


class Net(nn.Module):
    """A model that ignores additional entries of the batch and returns a loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.calls = 0

    def forward(self, x, y, **others):
        return {"loss": F.cross_entropy(self.body(x), y)}


def batches(count=STEPS):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(count, 6, 4, generator=generator), torch.randint(0, 3, (count, 6), generator=generator)
    return [
        dict(
            x=x[i],
            y=y[i],
            name=f"{i}.png",
            number=i,
            share=i / 7,
            meta=[dict(file=f"{i}_{j}") for j in range(6)],
        )
        for i in range(count)
    ]


def step_of(model, compile=None, optim=None, warn=None, backend="eager", **plan):
    optim = optim or OptimWrapper(SGD(model.parameters(), lr=0.1, momentum=0.9))
    how = {"backend": backend, **compile} if isinstance(compile, dict) else compile and {"backend": backend}
    spec = StepSpec(model, optim, lambda module, batch: sum_losses(module(**batch)), lambda batch: batch)
    return build_step(spec, SpeedPlan.read(dict(compile=how, **plan)), warn or pytest.fail)


def train(model, compile=None, data=None, **options):
    step = step_of(model, compile, **options)
    return torch.stack([step(batch)["loss"] for batch in data or batches()]), step


def assert_trains_as_eager(model, compile=True, **options):
    """Train a model with the step, and compare it with a copy that is trained eagerly.

    Return the step, its warnings and the backend.
    """
    said, graphs = [], Graphs()
    eager = copy.deepcopy(model)
    random.seed(1)
    expected, _ = train(eager)
    random.seed(1)
    losses, step = train(model, compile, warn=said.append, backend=graphs, **options)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(model.state_dict(), eager.state_dict(), rtol=1e-5, atol=1e-6)
    assert vars(model).get("calls") == vars(eager).get("calls")
    return step, said, graphs


# ---- selection --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [True, dict(scope="step")])
def test_compile_captures_the_step_as_a_single_graph(how):
    step, said, graphs = assert_trains_as_eager(Net(), how)
    assert type(step) is GraphStep
    assert (said, graphs.count) == ([], 1)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        (dict(_comm_hooks=[(run_comm_hook, HalfPrecision(None, torch.bfloat16))]), None),
        (
            dict(_comm_hooks=[(print, None)]),
            "a communication hook is registered, which a graph does not call",
        ),
        (
            dict(find_unused_parameters=True),
            "find_unused_parameters searches the autograd graph in each step",
        ),
    ],
)
def test_ddp_wrapper_supports_one_graph_with_half_precision_communication(changes, why):
    model = Net()
    optim = OptimWrapper(SGD(model.parameters(), lr=0.1))
    wrapper = object.__new__(MMDistributedDataParallel)  # the constructor requires a process group
    nn.Module.__init__(wrapper)
    vars(wrapper).update(dict(find_unused_parameters=False, _comm_hooks=[]) | changes)
    wrapper.module = model
    assert why_not_one_graph(wrapper, optim) == why


# ---- failed capture ---------------------------------------------------------------------------------------


class Branches(Net):
    def forward(self, x, y, **others):
        losses = super().forward(x, y)
        return losses if losses["loss"] < 1e9 else {"loss": losses["loss"] * 0}


class Draws(Net):
    def forward(self, x, y, **others):
        return {"loss": super().forward(x, y)["loss"] * (2 if random.random() < 0.5 else 1)}


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * (2 if grad.sum().item() < 1e9 else 1)


class OwnGradient(Net):
    def forward(self, x, y, **others):
        return {"loss": F.cross_entropy(Reads.apply(self.body(x)), y)}


@pytest.mark.parametrize("kind", [Branches, Draws, OwnGradient])
def test_failed_capture_compiles_only_the_model_and_names_the_line(kind):
    step, said, _ = assert_trains_as_eager(kind())
    assert type(step) is GraphStep
    assert not step.uses_graph
    assert "The step cannot be compiled as one graph (" in said[0]
    assert "test_speed_steps.py:" in said[0]
    assert "Only the model is compiled" in said[0]
    assert len(said) == 1


# ---- changes to trained parameters -------------------------------------------------------------------------


def test_frozen_and_unfrozen_parameters_match_eager():
    def run(compile, every):
        model, said, graphs = Net(), [], Graphs()
        step = step_of(model, compile, warn=said.append, backend=graphs)
        for number, batch in enumerate(batches(40)):
            if number % every == 0:
                model.body[0].requires_grad_(number // every % 2 == 0)
            step(batch)
        return parameters_to_vector(model.parameters()), said, graphs.count

    (found, said, _), (expected, _, _) = run(True, 10), run(None, 10)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert not said
    (found, said, graphs), (expected, _, _) = run(True, 1), run(None, 1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert "invalidated 9 times" in said[0]
    assert "requires_grad" in said[0]
    assert graphs <= 12  # the count includes the graphs of the model
