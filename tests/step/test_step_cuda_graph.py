"""A captured and replayed step has the same inputs and outputs as a called one."""

from functools import partial

import graphs
import pytest
import torch

from slipstream.optim import OptimWrapper
from slipstream.step.cuda_graph import CudaCapture, RecordedCalls


class Tape:
    """A mock of CUDA graphs with static inputs and outputs, and without computation during the capture."""

    def __init__(self):
        self.warmed = self.recorded = self.replayed = 0

    def warm_up(self, run):
        self.warmed += 1
        return run()

    def record(self, run):
        self.recorded += 1
        kept = STATE.clone()
        outputs = run()
        STATE.copy_(kept)

        def replay():
            self.replayed += 1
            for place, value in zip(outputs["all"], run()["all"], strict=True):
                place.copy_(value)

        return outputs, replay


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


class StepTape:
    """A mock of CUDA graphs for a step of a model. Changes made during the capture are reverted."""

    def __init__(self, model, optim):
        self.model, self.optim, self.replayed = model, optim, 0

    def warm_up(self, run):
        return run()

    def record(self, run):
        state = [*self.model.parameters(), *self.model.buffers()]
        state += [
            t
            for values in self.optim.optimizer.state.values()
            for t in values.values()
            if isinstance(t, torch.Tensor)
        ]
        kept = [tensor.detach().clone() for tensor in state]
        outputs = run()
        with torch.no_grad():
            for tensor, value in zip(state, kept, strict=True):
                tensor.copy_(value)

        def replay():
            self.replayed += 1
            logs, finite = run()
            for name, value in logs.items():
                outputs[0][name].copy_(value)
            if finite is not None:
                outputs[1].copy_(finite)

        return outputs, replay


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
    tape = StepTape(model, optim)
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
        tape = StepTape(model, optim)
        return graphs.graph_step(model, optim, record=lambda: RecordedCalls(tape), dynamic=False)

    torch.testing.assert_close(train(replayed).state_dict(), train(by_hand).state_dict())


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
