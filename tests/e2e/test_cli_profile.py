"""Tests of the command `slipstream profile` with a small network."""

import csv
import gzip
import json
import re
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slipstream.cli.main import main
from slipstream.cli.profiling import Synchronizations, source_line

CLOCK = [0.0]
"""Simulated time in seconds. Loading a sample takes 1 s, and a forward pass takes 24 s."""
CONFIG = """
from test_cli_profile import CLOCK
from tiny_runs import LOCAL, Net, loader, samples
from torch.utils.data import Dataset

class Samples(Dataset):
    inputs, targets = samples(16)
    def __len__(self):
        return 16
    def __getitem__(self, index):
        CLOCK[0] += 1.0
        return self.inputs[index], self.targets[index]

class Busy(Net):
    def forward(self, inputs, targets, mode):
        CLOCK[0] += 24.0
        return super().forward(inputs, targets, mode)

model = dict(type=Busy)
train_dataloader = loader(Samples())
train_cfg = dict(by_epoch=True, max_epochs=4)
optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.1))
visualizer = LOCAL
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(CONFIG)
    return str(tmp_path / "tiny.py")


def test_profile_writes_the_trace_and_reports_the_wait_for_data(config, tmp_path, capsys, monkeypatch):
    for module in ("cli.profiling", "logging.phases"):
        monkeypatch.setattr(f"slipstream.{module}.perf_counter", lambda: CLOCK[0])
    assert main(["profile", config, "--steps", "2", "--warmup", "1"]) == 0
    out = tmp_path / "work_dirs" / "tiny" / "profile"
    events = json.loads(gzip.decompress((out / "trace.json.gz").read_bytes()))["traceEvents"]
    steps = {event["name"] for event in events if str(event.get("name")).startswith("ProfilerStep")}
    assert len(steps) == 2
    with (out / "memory.csv").open() as file:
        assert all(float(row["milliseconds"]) >= 0 for row in csv.DictReader(file))
    printed = capsys.readouterr().out
    assert re.search(r"Optimizer\.step#SGD\.step +\d+\.\d+ +\d+\.\d% +1\.0\n", printed)
    assert "Step: 32000.0 ms, 0.2 samples/s (mean of 2 steps" in printed
    assert "Waiting for data: 25.0% of this time (8000.00 ms per step)" in printed
    assert "synchronizations: none, because CPU operations are synchronous" in printed
    assert sorted(path.name for path in out.iterdir()) == ["memory.csv", "trace.json.gz"]
    assert sorted(path.name for path in out.parent.iterdir()) == ["profile"]  # no logs or checkpoints


def test_hooks_that_write_files_do_not_run(config, monkeypatch):
    hooks = """
from slipstream.hooks import CheckpointHook, Hook

class Saver(CheckpointHook):
    pass

class Own(Hook):
    pass

default_hooks = dict(extra=dict(type=Saver))
custom_hooks = [dict(type="ProfilerHook"), Saver(), dict(type=Own), dict(type="ReportHook"), Own()]
"""
    Path(config).write_text(CONFIG + hooks)
    seen = []
    monkeypatch.setattr(
        "slipstream.runner.Runner.train", lambda self: seen.extend(type(hook).__name__ for hook in self.hooks)
    )
    assert main(["profile", config]) == 2  # no step has run
    assert seen.count("Own") == 2
    assert not {"Saver", "CheckpointHook", "ProfilerHook", "ReportHook"} & {*seen}


def test_sigterm_ends_the_command_without_a_checkpoint(config, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    hook = """
import os, signal
from slipstream.hooks import Hook

class Terminate(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        os.kill(os.getpid(), signal.SIGTERM)

custom_hooks = [dict(type=Terminate), dict(type="PreemptionHook")]
"""
    Path(config).write_text(CONFIG + hook)
    assert main(["profile", config]) == 130
    assert "saved" not in "".join(capfd.readouterr())
    assert not list((tmp_path / "temporary").iterdir())


def test_training_that_ends_too_early_raises_an_error(config, capsys):
    assert main(["profile", config, "--steps", "5", "--warmup", "1"]) == 2
    assert "training ended after 8 of 12 steps (1 for warm-up, 5 timed" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "value"), [("--steps", "0"), ("--warmup", "-1"), ("--steps", "x")])
def test_numbers_of_steps_must_be_positive(config, option, value, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["profile", config, f"{option}={value}"])
    assert stopped.value.code == 2
    assert f"'{value}' is not a positive integer" in capsys.readouterr().err


def test_unwritable_folder_raises_an_error_before_training(config, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["profile", config, "--out", str(tmp_path / "file" / "out")]) == 2
    assert "--out: cannot write to the folder" in capsys.readouterr().err


def test_error_in_the_training_step_is_reported(config, tmp_path, capsys):
    assert main(["profile", config, "optim_wrapper.optimizer.lr=-1"]) == 2
    assert "lr" in capsys.readouterr().err
    assert not list((tmp_path / "work_dirs/tiny/profile").iterdir())


def test_synchronizations_are_counted_by_source_line(monkeypatch):
    modes = []
    monkeypatch.setattr(
        torch, "get_device_module", lambda _: SimpleNamespace(set_sync_debug_mode=modes.append)
    )
    found = Synchronizations(torch.device("cuda"))
    assert found.problem is None
    with warnings.catch_warnings(record=True) as others, found.counting():
        warnings.simplefilter("always")
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert modes == ["warn", "default"]
    assert [str(other.message) for other in others] == ["something else"]
    ((line, count),) = found.lines.items()
    assert count == 3
    assert re.fullmatch(rf'{re.escape(__file__)}:\d+: warnings.warn\("called.*', line)


def test_devices_without_the_sync_debug_mode_are_reported(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace())
    found = Synchronizations(torch.device("xpu"))
    with found.counting():
        pass
    assert found.problem == "not reported, because torch.xpu has no set_sync_debug_mode"


def test_source_line_is_in_the_users_code_and_not_in_the_engine():
    from slipstream.registry import Registry

    registry = Registry("lines")
    seen = []

    @registry.register_module()
    def user():
        seen.append(source_line())

    registry.build(dict(type="user"))
    assert seen[0].endswith("seen.append(source_line())")
    assert seen[0].startswith(__file__)
