"""Tests of the text that the progress bar shows."""

import io
import re

import pytest
from rich.console import Console
from torch.utils.data import TensorDataset

from slipstream.hooks import ProgressBarHook
from slipstream.runner import Runner
from tiny_runs import Net, loader, samples, training, validation


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that changes only when a test advances it."""
    now = [0.0]
    for module in ("logging.phases", "hooks.timing"):
        monkeypatch.setattr(f"slipstream.{module}.perf_counter", lambda: now[0])
    return now


def bar(tmp_path, monkeypatch, console=None, **changes):
    """Train with a progress bar. Return the Runner and the console's output."""
    monkeypatch.setattr("slipstream.logging.progress._SECONDS_BETWEEN_DRAWS", 0.0)
    console = console or Console(force_terminal=True, file=io.StringIO(), width=120, color_system=None)
    monkeypatch.setattr("slipstream.logging.logger._console", lambda stderr=False: console)
    hooks = dict(logger=dict(type="LoggerHook", interval=1), checkpoint=None)
    runner = Runner(**training(tmp_path, **{"default_hooks": hooks, **validation(), **changes}))
    runner.train()
    return runner, console.file.getvalue()


def test_bar_shows_loss_rate_metric_speed_and_waiting(tmp_path, monkeypatch, clock):
    """A step takes 3 s and the wait for its batch 1 s, so 8 samples take 4 s."""

    class Slow(Net):
        def forward(self, inputs, targets, mode):
            clock[0] += 3.0 if mode == "loss" else 0.0
            return super().forward(inputs, targets, mode)

    class Waits(TensorDataset):
        def __getitem__(self, index):
            clock[0] += 1.0 / 8
            return super().__getitem__(index)

    runner, text = bar(
        tmp_path, monkeypatch, model=Slow(), train_dataloader=loader(Waits(*samples()), shuffle=False)
    )
    last = text.replace("\r", "\n").split("training")[-1]
    assert "10/10" in last
    loss = runner.message_hub.get_scalar("train/loss")
    shown = float(re.search(r"loss (\S+)", last)[1])
    assert shown == pytest.approx(loss.mean(10), abs=1e-3) or shown == pytest.approx(
        loss.data[0][:9].mean(), abs=1e-3
    )
    assert "lr 0.1 " in last
    assert "2 images/s" in last
    assert "25% waiting for data" in last
    assert "acc" not in text.split("training")[1]
    assert re.search(r"acc 0\.\d+ ", last)


def test_without_a_terminal_there_is_no_bar(tmp_path, monkeypatch):
    runner, text = bar(tmp_path, monkeypatch, Console(file=io.StringIO(), width=120))
    assert "images/s" not in text
    assert not any(isinstance(hook, ProgressBarHook) for hook in runner.hooks)
