"""Capture and replay of a step have the same inputs and outputs as calls."""

import pytest
import torch

from slipstream.step.cuda_graph import CudaCapture, Replayed


class Tape:
    """A mock of CUDA graphs: static inputs and outputs, no computation during the capture."""

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


def step(inputs, factor):
    STATE.add_(inputs[0].sum())
    return {"all": [inputs[0] * factor, STATE.clone()]}


@pytest.fixture(autouse=True)
def _from_zero():
    STATE.zero_()


def test_warm_up_capture_and_replay_each_run_one_step():
    tape = Tape()
    run, total, kept = Replayed(step, tape), 0.0, []
    for number in range(6):
        doubled, state = run([torch.full((2,), float(number))], 2)["all"]
        total += 2 * number
        assert torch.equal(doubled, torch.full((2,), 2.0 * number))
        assert float(state) == total == float(STATE)
        kept.append(doubled)
    assert (tape.warmed, tape.recorded, tape.replayed) == (3, 1, 3)
    assert [float(t[0]) for t in kept] == [0, 2, 4, 6, 8, 10]  # replays do not overwrite outputs


def test_other_shapes_and_values_use_separate_graphs():
    tape = Tape()
    run = Replayed(step, tape)
    for _ in range(5):
        run([torch.ones(2)], 2)
        run([torch.ones(3)], 2)
        assert float(run([torch.ones(2)], 5)["all"][0][0]) == 5
    assert tape.recorded == 3


def test_depends_is_checked_before_each_replay():
    """Guards check the training mode of modules; a replay does not."""
    tape, mode = Tape(), [1]

    def work(inputs):
        return {"all": [inputs[0] * mode[0]]}

    run = Replayed(work, tape, lambda: mode[0])
    for mode[0] in (1, 2, 1, 2) * 5:
        assert float(run([torch.ones(1)])["all"][0]) == mode[0]
    assert tape.recorded == 2


def test_calls_beyond_the_graph_limit_run_without_a_graph():
    tape, said = Tape(), []
    run = Replayed(step, tape, warn=said.append)
    for number in range(200):
        assert float(run([torch.ones(1)], number)["all"][0]) == number
        run([torch.ones(3)], 0)
    assert tape.recorded == 1
    assert len(run._calls) == 16
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
    run = Replayed(descend, CudaCapture())
    for x in inputs:
        expected.sub_(0.1 * (expected * x).sum() * x)
        torch.testing.assert_close(run(x), expected.sum())
    torch.testing.assert_close(weight, expected)
