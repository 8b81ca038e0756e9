"""Tests of the command `slipstream profile` with a small network."""

import gzip
import json
import time

import pytest
import torch
from torch.utils.data import Dataset

import tiny_runs
from accelerators import cuda_only
from slipstream.cli.main import main

CONFIG = """
from test_cli_profile import Slow
from tiny_runs import LOCAL, Net, loader

model = dict(type=Net)
train_dataloader = loader(Slow())
train_cfg = dict(by_epoch=True, max_epochs=4)
optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.1))
custom_hooks = [dict(type="ProfilerHook"), dict(type="CheckpointHook", interval=1, by_epoch=False)]
visualizer = LOCAL
"""


class Slow(Dataset):
    """A dataset whose samples take 5 ms, so a batch of 8 takes at least 40 ms."""

    inputs, targets = tiny_runs.samples(16)

    def __len__(self):
        return 16

    def __getitem__(self, index):
        time.sleep(0.005)
        return self.inputs[index], self.targets[index]


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(CONFIG)
    return "tiny.py"


def test_profile_writes_the_trace_and_reports_the_wait_for_data(config, tmp_path, capsys):
    assert main(["profile", config, "--steps", "2", "--warmup", "1"]) == 0
    out = tmp_path / "work_dirs/tiny/profile"
    events = json.loads(gzip.decompress((out / "trace.json.gz").read_bytes()))["traceEvents"]
    steps = {event["name"] for event in events if str(event.get("name")).startswith("ProfilerStep")}
    assert len(steps) == 2
    printed = capsys.readouterr().out
    assert "Optimizer.step#SGD.step" in printed
    step = float(printed.partition("Step: ")[2].partition(" ms")[0])
    waited = float(printed.partition("Waiting for data: ")[2].partition("%")[0])
    assert step > 40
    assert waited > 40
    # No logs, checkpoints or traces of the run's own hooks remain.
    assert [path.name for path in out.parent.iterdir()] == ["profile"]
    assert [path.name for path in out.iterdir()] == ["trace.json.gz"]


def test_training_that_is_too_short_is_reported(config, capsys):
    assert main(["profile", config, "--steps", "4", "--warmup", "2"]) == 2
    assert "training ended after 8 of 11 steps" in capsys.readouterr().err


def test_a_launcher_is_rejected(config, capsys):
    assert main(["profile", config, "launcher=pytorch"]) == 2
    assert "only a single process can be profiled" in capsys.readouterr().err


@pytest.mark.gpu
@cuda_only
def test_synchronizations_are_counted_by_source_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    waiting = "\nfrom test_cli_profile import Waiting\nmodel = dict(type=Waiting)\n"
    (tmp_path / "tiny.py").write_text(CONFIG + waiting)
    assert main(["profile", "tiny.py", "--steps", "2", "--warmup", "1"]) == 0
    printed = capsys.readouterr().out
    assert f"  2x {__file__}:" in printed


class Waiting(tiny_runs.Net):
    """A network that reads a value from the device in each step."""

    def forward(self, inputs, targets, mode):
        losses = super().forward(inputs, targets, mode)
        assert torch.isfinite(losses["loss"]).item()
        return losses
