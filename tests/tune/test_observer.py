"""Tests of the loss and the step time that a trial reports."""

import pytest
import torch

from slipstream.errors import ModelError
from slipstream.tune import observer
from slipstream.tune.observer import Finished, Timer, total_loss


def test_the_loss_that_is_minimized_is_compared():
    assert float(total_loss({"loss": torch.tensor(3.0), "loss_aux": torch.tensor(1.0)})) == 3.0
    assert (
        float(total_loss({"loss_g": torch.tensor(3.0), "d_loss": torch.tensor([1.0, 2.0]), "acc": 1.0}))
        == 6.0
    )


def test_a_step_without_a_loss_cannot_be_compared():
    with pytest.raises(ModelError, match="no entry with 'loss' in its name"):
        total_loss({"acc": torch.tensor(1.0)})


class Requests:
    """A connection that requests `steps` steps once and records the messages sent to it."""

    def __init__(self, steps):
        self.steps, self.received = [steps], []

    def send(self, message):
        self.received.append(message)

    def recv(self):
        if not self.steps:
            raise EOFError
        return self.steps.pop(), 1


def test_measured_time_includes_rare_slow_steps(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(observer.time, "perf_counter", lambda: now[0])
    requests = Requests(8)
    timer = Timer(requests, warmup=1)

    def train():
        for step in range(100):
            # every fourth step is slow, as if it waited for data or updated the weights
            now[0] += 1.0 if step % 4 == 0 else 0.2
            timer.after_step(torch.tensor(1.0))

    with pytest.raises(Finished):
        train()
    assert requests.received[-1]["seconds"] == pytest.approx(0.4)
