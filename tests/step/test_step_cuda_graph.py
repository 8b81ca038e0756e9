"""A captured and replayed step has the same inputs and outputs as a called one."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import graphs
import numpy as np
import pytest
import torch
from tape import Tape

from accelerators import cuda_only
from slipstream.optim import OptimWrapper
from slipstream.step.cuda_graph import CudaCapture, RecordedCalls

STATE = torch.zeros(())


def step(arguments):
    inputs, factor = arguments
    STATE.add_(inputs[0].sum())
    return {"all": [inputs[0] * factor, STATE.clone()]}


@pytest.fixture(autouse=True)
def _from_zero():
    STATE.zero_()


def test_warm_up_capture_and_replay_each_run_one_step():
    tape = Tape()
    run, total, kept = partial(RecordedCalls(tape), step), 0.0, []
    for number in range(6):
        doubled, state = run(([torch.full((2,), float(number))], 2))["all"]
        total += 2 * number
        assert torch.equal(doubled, torch.full((2,), 2.0 * number))
        assert float(state) == total == float(STATE)
        kept.append(doubled)
    assert (tape.warmed, tape.recorded, tape.replayed) == (3, 1, 3)
    assert [float(t[0]) for t in kept] == [0, 2, 4, 6, 8, 10]  # replays do not overwrite outputs


def test_other_shapes_and_values_use_separate_graphs():
    tape = Tape()
    run = partial(RecordedCalls(tape), step)
    for _ in range(5):
        run(([torch.ones(2)], 2))
        run(([torch.ones(3)], 2))
        assert float(run(([torch.ones(2)], 5))["all"][0][0]) == 5
    assert tape.recorded == 3


def test_each_function_is_recorded_separately():
    """Dynamo's guards choose the function before each replay."""
    tape = Tape()
    calls = RecordedCalls(tape)
    functions = [lambda arguments, factor=factor: {"all": [arguments[0] * factor]} for factor in (1, 2)]
    for factor in (1, 2, 1, 2) * 5:
        assert float(calls(functions[factor - 1], [torch.ones(1)])["all"][0]) == factor
    assert tape.recorded == 2


def test_replay_changes_the_arguments_that_the_function_changes():
    def work(arguments):
        arguments[1].add_(arguments[0])
        return {"all": [arguments[1].sum()]}

    calls, total = RecordedCalls(Tape()), torch.zeros(2)
    for number in range(8):
        given = torch.full((2,), float(number))
        calls(work, [given, total])
        assert torch.equal(given, torch.full((2,), float(number)))
    assert torch.equal(total, torch.full((2,), 28.0))


class Foreign(torch.optim.SGD):
    """An optimizer that steps after the graph, because it is not a class of torch."""


Foreign.__module__ = __name__


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("make", [torch.optim.SGD, Foreign])
def test_replayed_step_matches_a_plain_loop(make, window):
    make, data = partial(make, lr=0.05, momentum=0.9), graphs.batches(16)
    expected, _, losses = graphs.by_hand(make, data, window=window)
    model = graphs.net()
    optim = OptimWrapper(optimizer=make(model.parameters()), accumulative_counts=window)
    tape = Tape()
    step = graphs.graph_step(model, optim, record=lambda: RecordedCalls(tape), dynamic=False)
    torch.testing.assert_close(graphs.train(step, data), losses)
    assert tape.replayed >= 4
    torch.testing.assert_close(model.state_dict(), expected.state_dict())


def test_replayed_step_detects_a_changed_attribute():
    make, data = partial(torch.optim.SGD, lr=0.05), graphs.batches(16)

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.factor = graphs.net(), 1.0

        def forward(self, x):
            return self.net(x) * self.factor

    def train(step_of):
        model = Scaled()
        step = step_of(model)
        for number, batch in enumerate(data):
            model.factor = 1.0 if number < 10 else 3.0
            step(batch)
        return model

    def by_hand(model):
        optimizer = make(model.parameters())

        def step(batch):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()

        return step

    def replayed(model):
        optim = OptimWrapper(optimizer=make(model.parameters()))
        tape = Tape()
        return graphs.graph_step(model, optim, record=lambda: RecordedCalls(tape), dynamic=False)

    torch.testing.assert_close(train(replayed).state_dict(), train(by_hand).state_dict())


class Counts(torch.nn.Module):
    """A network whose forward counts its calls in Python and uses the count."""

    def __init__(self):
        super().__init__()
        self.net, self.calls = graphs.net(), 0

    def forward(self, x):
        self.calls += 1
        return self.net(x) * (1.0 + 0.1 * min(self.calls, 6))


def test_step_with_a_counter_in_python_is_not_replayed():
    make, data = partial(torch.optim.SGD, lr=0.05), graphs.batches(16)
    tape, model, expected = Tape(), Counts(), Counts()
    optim = OptimWrapper(optimizer=make(model.parameters()))
    step = graphs.graph_step(
        model, optim, record=lambda: RecordedCalls(tape), dynamic=False, recover=lambda error: step.eager
    )
    optimizer = make(expected.parameters())
    for batch in data:
        step(batch)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(expected(batch[0]), batch[1]).backward()
        optimizer.step()
    assert tape.recorded == 0
    torch.testing.assert_close(model.state_dict(), expected.state_dict())


def test_values_that_are_not_hashable_are_not_part_of_the_key():
    tape = Tape()
    run = partial(RecordedCalls(tape), lambda arguments: {"all": [arguments["x"] + 1]})
    for number in range(6):
        batch = {"x": torch.full((2,), float(number)), "names": np.array(["a", "b"])}
        assert float(run(batch)["all"][0][0]) == number + 1
    assert tape.replayed == 3


class BrokenCapture(Tape):
    def record(self, run):
        super().record(run)
        raise RuntimeError("operation not permitted when stream is capturing")


def test_failed_capture_is_reported_once_and_the_step_runs_without_a_graph():
    tape, said = BrokenCapture(), []
    run = partial(RecordedCalls(tape, said.append), step)
    total = 0.0
    for number in range(8):
        total += 2 * number
        assert float(run(([torch.full((2,), float(number))], 2))["all"][1]) == total
    assert tape.recorded == 1
    (message,) = said
    assert "not permitted when stream is capturing" in message
    assert "Remove cuda_graph" in message


AT_EXIT = """
import atexit, sys
sys.path.append(sys.argv[1])
atexit.register(print, "process group")
import torch
from tape import Tape
from slipstream.step.cuda_graph import RecordedCalls

class Graph:
    def __call__(self): pass
    def __del__(self): print("graph")

class Captures(Tape):
    def record(self, run): return run(), Graph()

calls = RecordedCalls(Captures())
def run(arguments): return arguments[0] + 1
for _ in range(5): calls(run, [torch.ones(1)])
if sys.argv[2] == "deleted":
    del calls
    print("deleted")
"""


@pytest.mark.parametrize(
    ("kept", "order"), [("kept", ["graph", "process group"]), ("deleted", ["graph", "deleted"])]
)
def test_graphs_are_released_with_the_step_or_before_the_process_group(kept, order):
    arguments = [sys.executable, "-c", AT_EXIT, str(Path(__file__).parent), kept]
    lines = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=60).stdout.split(
        "\n"
    )
    assert lines[:2] == order


def test_number_of_recorded_graphs_is_limited():
    tape, said = Tape(), []
    calls = RecordedCalls(tape, said.append)
    run = partial(calls, step)
    for number in range(200):
        assert float(run(([torch.ones(1)], number))["all"][0]) == number
        run(([torch.ones(3)], 0))
    assert tape.recorded == 1
    assert len(calls._calls) == 16
    assert tape.warmed == 18
    (message,) = said
    assert "more than 16 CUDA graphs" in message


@pytest.mark.gpu
@cuda_only
def test_cuda_graph_matches_its_function():
    weight = torch.ones(4, device="cuda")

    def descend(x):
        weight.sub_(0.1 * (weight * x).sum() * x)
        return weight.sum()

    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).cuda()
    expected = torch.ones(4, device="cuda")
    calls = RecordedCalls(CudaCapture())
    for x in inputs:
        expected.sub_(0.1 * (expected * x).sum() * x)
        torch.testing.assert_close(calls(descend, x), expected.sum())
    torch.testing.assert_close(weight, expected)
