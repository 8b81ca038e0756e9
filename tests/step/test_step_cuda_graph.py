"""A captured and replayed step returns the same outputs as a plain call."""

import gc
import weakref
from functools import partial

import graphs
import pytest
import torch
from tape import Tape

from accelerators import cuda_only
from slipstream.optim import OptimWrapper
from slipstream.step.cuda_graph import CudaCapture, CudaGraphs

STATE = torch.zeros(())


def step(tensors):
    STATE.add_(tensors[0].sum())
    return {"all": [tensors[0] * 2, STATE.clone()]}


@pytest.fixture(autouse=True)
def _from_zero():
    STATE.zero_()


def test_warm_up_capture_and_replay_each_run_one_step():
    tape = Tape()
    run, total, kept = partial(CudaGraphs(tape, pytest.fail), step), 0.0, []
    for number in range(6):
        doubled, state = run([torch.full((2,), float(number))])["all"]
        total += 2 * number
        assert torch.equal(doubled, torch.full((2,), 2.0 * number))
        assert float(state) == total == float(STATE)
        kept.append(doubled)
    assert (tape.warmed, tape.captured, tape.replayed) == (3, 1, 3)
    assert [float(t[0]) for t in kept] == [0, 2, 4, 6, 8, 10]  # replays do not overwrite outputs


def test_replay_changes_the_arguments_that_the_function_changes():
    def work(arguments):
        arguments[1].add_(arguments[0])
        return {"all": [arguments[1].sum()]}

    calls, total = CudaGraphs(Tape(), pytest.fail), torch.zeros(2)
    for number in range(8):
        given = torch.full((2,), float(number))
        calls(work, [given, total])
        assert torch.equal(given, torch.full((2,), float(number)))
    assert torch.equal(total, torch.full((2,), 28.0))


class Foreign(torch.optim.SGD):
    """An optimizer that steps outside the graph because its class is not part of torch."""


Foreign.__module__ = __name__


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("make", [torch.optim.SGD, Foreign])
def test_replayed_step_matches_a_plain_loop(make, window):
    make, data = partial(make, lr=0.05, momentum=0.9), graphs.batches(16)
    expected, _, losses = graphs.by_hand(make, data, window=window)
    model = graphs.net()
    optim = OptimWrapper(optimizer=make(model.parameters()), accumulative_counts=window)
    tape = Tape()
    step = graphs.graph_step(model, optim, cuda_graphs=lambda: CudaGraphs(tape, pytest.fail), dynamic=False)
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
        return graphs.graph_step(
            model, optim, cuda_graphs=lambda: CudaGraphs(tape, pytest.fail), dynamic=False
        )

    torch.testing.assert_close(train(replayed).state_dict(), train(by_hand).state_dict())


class BrokenCapture(Tape):
    def capture(self, run):
        super().capture(run)
        raise RuntimeError("operation not permitted when stream is capturing")


def test_failed_capture_is_reported_once_and_the_step_runs_without_a_graph():
    tape, said = BrokenCapture(), []
    run = partial(CudaGraphs(tape, said.append), step)
    total = 0.0
    for number in range(8):
        total += 2 * number
        assert float(run([torch.full((2,), float(number))])["all"][1]) == total
    assert tape.captured == 1
    (message,) = said
    assert "not permitted when stream is capturing" in message
    assert "Fix the cause, or remove cuda_graph" in message


class Replay:
    """A CUDA graph whose replay does nothing."""

    def __call__(self):
        pass


class Graphs(Tape):
    """A mock of CUDA graphs that keeps weak references to the graphs."""

    def __init__(self):
        super().__init__()
        self.alive = weakref.WeakSet()

    def capture(self, run):
        graph = Replay()
        self.alive.add(graph)
        return run(), graph


def test_graphs_are_released_when_the_step_is_closed():
    """Graphs must be released before `destroy_process_group`, without waiting for garbage collection."""
    model, capture = graphs.net(), Graphs()
    optim = OptimWrapper(optimizer=torch.optim.SGD(model.parameters(), lr=0.05))
    step = graphs.graph_step(
        model, optim, cuda_graphs=lambda: CudaGraphs(capture, pytest.fail), dynamic=False
    )
    gc.disable()
    try:
        graphs.train(step, graphs.batches(10))
        assert len(capture.alive) == 1
        step.close()
        assert not capture.alive
    finally:
        gc.enable()


@pytest.mark.gpu
@cuda_only
def test_cuda_graph_matches_its_function():
    weight = torch.ones(4, device="cuda")

    def descend(tensors):
        (x,) = tensors
        weight.sub_(0.1 * (weight * x).sum() * x)
        return weight.sum()

    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).cuda()
    expected = torch.ones(4, device="cuda")
    calls = CudaGraphs(CudaCapture(), pytest.fail)
    for x in inputs:
        expected.sub_(0.1 * (expected * x).sum() * x)
        torch.testing.assert_close(calls(descend, [x]), expected.sum())
    torch.testing.assert_close(weight, expected)
