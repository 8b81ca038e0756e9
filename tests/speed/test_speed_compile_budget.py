"""A model whose compilation reaches its time limit runs eagerly or with compiled blocks."""

import copy
import logging
import os
import time

import pytest
import torch
from compiled_nets import Backend, Net, assert_as_eager, batches, run
from torch import nn
from torch.utils.checkpoint import checkpoint

from slipstream.model import BaseModel
from slipstream.speed import compile_budget, graph_step
from slipstream.speed.apply import compiling
from slipstream.speed.compile import CompileOptions, compile_model
from slipstream.speed.plan import SpeedPlan
from slipstream.speed.steps import compiled_scope
from slipstream.step.background import can_fork

pytestmark = pytest.mark.skipif(not can_fork("cpu"), reason="requires fork on Linux")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


class Slow(Backend):
    """A backend that takes a minute in a forked process."""

    def __init__(self):
        super().__init__()
        self.pid = os.getpid()

    def __call__(self, graph, inputs):
        if os.getpid() != self.pid:
            time.sleep(60)
        return super().__call__(graph, inputs)


class Deep(BaseModel):
    """A network with repeated blocks that have child modules."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(3, 2)

    def forward(self, x, y, mode="tensor"):
        for block in self.blocks:
            x = block(x)
        out = self.last(x)
        if mode == "loss":
            return {"loss": nn.functional.cross_entropy(out, y)}
        return {"preds": out, "targets": y} if mode == "predict" else out


@pytest.mark.parametrize("amp", [False, True])
def test_model_is_compiled_within_the_limit_for_training_and_validation(amp):
    model, warnings, backend = Net(), [], Backend()
    eager = copy.deepcopy(model)
    compile_model(model, CompileOptions(backend, budget=60, wait=True), warnings.append)
    assert_as_eager(model, eager, amp)
    assert warnings == []
    assert backend.graphs == 2  # the graphs of the forked processes are not counted
    assert backend.calls == 6 + 3


def test_training_continues_eagerly_during_the_compilation():
    model, backend = Net(), Slow()
    compile_model(model, CompileOptions(backend, budget=60), pytest.fail)
    run(model, batches(4))
    assert backend.graphs == 0  # the forked process has not finished
    assert compiled_scope(None, model) == "model"


def test_model_without_blocks_runs_eagerly_after_the_limit_with_one_warning():
    model, warnings, backend = Net(), [], Slow()
    eager = copy.deepcopy(model)
    compile_model(model, CompileOptions(backend, budget=0.5, wait=True), warnings.append)
    assert_as_eager(model, eager)
    assert backend.graphs == 0
    assert compiled_scope(None, model) is None
    assert warnings == [
        "Net runs eagerly, because its compilation takes longer than compile.budget (0.5 s). Increase the budget, or "
        "set compile=False"
    ]


@pytest.fixture
def exceeding(monkeypatch):
    """Return a function that selects, by number, the background compilations that exceed the limit.

    A mock replaces the background compiler, so nothing is compiled in the background.
    """

    def select(*numbers):
        class Mock:
            started = 0

            def __init__(self, limit, wait):
                self.exceeded = False

            def start(self, work):
                Mock.started += 1
                self.exceeded = Mock.started in numbers

            def done(self):
                return True

        monkeypatch.setattr(compile_budget, "BackgroundCompiler", Mock)

    return select


def test_only_the_blocks_are_compiled_if_the_model_takes_too_long(exceeding):
    exceeding(1)
    model, warnings, backend = Deep(), [], Backend()
    eager = copy.deepcopy(model)
    compile_model(model, CompileOptions(backend, budget=60), warnings.append)
    assert_as_eager(model, eager)
    assert compiled_scope(None, model) == "block"
    assert len(warnings) == 1
    assert warnings[0].startswith("Only the repeated blocks of Deep are compiled, not the whole model")
    assert backend.calls == 2 * (5 + 3)  # two blocks, but the first batch runs eagerly


def test_model_runs_eagerly_if_the_blocks_take_too_long(exceeding):
    exceeding(1, 2)
    model, warnings, backend = Deep(), [], Backend()
    eager = copy.deepcopy(model)
    compile_model(model, CompileOptions(backend, budget=60), warnings.append)
    assert_as_eager(model, eager)
    assert compiled_scope(None, model) is None
    assert [text.partition(",")[0] for text in warnings] == [
        "Only the repeated blocks of Deep are compiled",
        "Deep runs eagerly",
    ]
    assert backend.graphs == 0


def test_slow_validation_does_not_affect_compiled_training(exceeding):
    exceeding(2)
    model, warnings, backend = Net(), [], Backend()
    eager = copy.deepcopy(model)
    compile_model(model, CompileOptions(backend, budget=60), warnings.append)
    assert_as_eager(model, eager)
    assert len(warnings) == 1
    assert warnings[0].startswith("Net is evaluated eagerly")
    assert backend.calls == 6


class InPlace(BaseModel):
    """A network that changes its input in place."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.last = nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x):
        return self.last(self.norm(x.sub_(0.5)))


def test_the_forked_process_does_not_change_shared_memory():
    """Batches from loader workers are in shared memory, and so is a model after `share_memory`."""
    model, (x, _) = InPlace(), batches(1)[0]
    model.share_memory()
    eager, expected = copy.deepcopy(model), x.clone()
    x.share_memory_()
    compile_model(model, CompileOptions("aot_eager", budget=60, wait=True), pytest.fail)
    torch.testing.assert_close(model(x), eager(expected))
    assert torch.equal(x, expected)
    torch.testing.assert_close(model.state_dict(), eager.state_dict())


class Checkpointed(nn.Module):
    """A network that checkpoints the activations of its blocks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def train_twice_per_update(model, data):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        (model(first).square().sum() + model(second).sum()).backward()
        optimizer.step()


@pytest.mark.parametrize("ready", [0, 1, 2, 3])
def test_checkpointed_blocks_are_recomputed_with_the_code_of_the_forward_pass(monkeypatch, ready):
    """Recomputation uses the same code even if the compilation ends or reaches its limit between two forward passes."""

    class Ends:
        exceeded, asked = False, 0

        def __init__(self, limit, wait):
            pass

        def start(self, work):
            pass

        def done(self):
            Ends.asked += 1
            return Ends.asked > ready

    monkeypatch.setattr(compile_budget, "BackgroundCompiler", Ends)
    model, data = Checkpointed(), [x for x, _ in batches(12)]
    eager = copy.deepcopy(model)
    how = CompileOptions("aot_eager", scope="block", dynamic=False, budget=60)
    compile_model(model, how, pytest.fail)
    train_twice_per_update(model, data[:8])
    assert model._compiled_call_impl._ready
    model._compiled_call_impl._spent = 61.0
    data[8:10] = [x[:5] for x in data[8:10]]  # requires a new graph, which is not compiled
    train_twice_per_update(model, data[8:])
    train_twice_per_update(eager, data)
    torch.testing.assert_close(model.state_dict(), eager.state_dict(), rtol=1e-5, atol=1e-6)


def test_no_further_graph_is_compiled_in_this_process_after_the_limit():
    model, backend = Net(), Backend()
    compile_model(model, CompileOptions(backend, dynamic=False, budget=30, wait=True), pytest.fail)
    data = batches(3)
    run(model, data[:1])
    model._compiled_call_impl._spent = 31.0
    eager = copy.deepcopy(model)
    smaller = [(x[:5], y[:5]) for x, y in data[1:]]
    losses, _ = run(model, smaller)
    assert backend.graphs == 1
    torch.testing.assert_close(losses, run(eager, smaller)[0], rtol=1e-6, atol=1e-6)
    used = backend.calls
    run(model, data[1:2])
    assert backend.calls == used + 1  # the existing graph is still used


@pytest.mark.parametrize("evaluation", [False, True])
def test_no_process_compiles_the_model_after_the_run(evaluation):
    model, plan = Net(), SpeedPlan(compile=CompileOptions(Slow(), budget=None if evaluation else 60))
    with compiling(plan, model, logging.getLogger("test")):
        if evaluation:
            graph_step._compile_evaluation(model, plan.compile, pytest.fail, in_background=True)
            call = model._compiled_call_impl.compiled
        else:
            compile_model(model, plan.compile, pytest.fail)
            call = model._compiled_call_impl
        x, y = batches(1)[0]
        with torch.set_grad_enabled(not evaluation):
            model.train(not evaluation)(x, y)
        assert call._background.started
    assert not call._background.started


def test_evaluation_next_to_a_compiled_step_does_not_wait_and_compiles_one_graph(monkeypatch):
    class Mock:
        finished = exceeded = False

        def __init__(self, limit, wait):
            assert not wait

        def start(self, work):
            pass

        def done(self):
            return Mock.finished

    monkeypatch.setattr(compile_budget, "BackgroundCompiler", Mock)
    model, backend = Net(), Backend()
    expected = copy.deepcopy(model).eval()
    graph_step._compile_evaluation(model, CompileOptions(backend), pytest.fail, in_background=True)
    model.eval()
    calls = []
    for finished, size in ((False, 4), (True, 4), (True, 3), (True, 4)):
        Mock.finished = finished
        x, y = batches(1)[0]
        with torch.no_grad():
            torch.testing.assert_close(model(x[:size], y[:size]), expected(x[:size], y[:size]))
        calls.append((backend.graphs, backend.calls))
    assert calls == [(0, 0), (1, 1), (1, 1), (1, 2)]
