"""Tests of `slipstream bench` with a small network."""

import json

import pytest

from slipstream.cli import bench
from slipstream.cli.main import main

CONFIG = """
from tiny_runs import Net, loader, samples

model = dict(type=Net)
train_dataloader = loader()
train_cfg = dict(by_epoch=True, max_epochs=1)
optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.1))
"""
SHORT = ["--steps", "5", "--warmup", "3", "--out", "out"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "tiny.py").write_text(CONFIG)
    return tmp_path


def results(folder):
    return json.loads((folder / "out/bench.json").read_text())


def test_combinations_of_options_are_measured_and_written(folder, capsys):
    assert main(["bench", "tiny.py", "speed.accumulate=2", "--mode", "eager", *SHORT]) == 0
    found = results(folder)
    assert {"date", "cpu", "cores", "torch", "slipstream"} <= found.keys()
    labels = ["eager, float32", "eager, AMP"]
    assert [run["run"] for run in found["runs"]] == labels
    for run in found["runs"]:
        assert (len(run["seconds"]), run["samples_per_step"], run["status"]) == (5, 8, "")
        assert run["peak_mib"] > 1
    assert found["runs"][0]["ratio"]["ratio"] == 1.0
    printed = capsys.readouterr().out
    assert "samples/s" in printed
    progress = ["eager, float32: starting", "the fastest step so far: ", "AMP: ready", "round 5 of 5"]
    assert sorted(progress, key=printed.index) == progress
    assert sorted(path.name for path in folder.iterdir()) == ["out", "tiny.py"]  # no logs


def test_frameworks_train_like_the_hand_written_loop(folder):
    peers = [name for name in ("accelerate", "lightning", "mmengine") if bench.is_installed(name)]
    status = main(["bench", "tiny.py", "--against", ",".join(["slipstream", *peers]), *SHORT])
    runs = {run["run"]: run for run in results(folder)["runs"]}
    assert {"loop", "slipstream"} <= runs.keys()
    compiled = runs.pop("slipstream_compiled")
    assert all(run["status"] == "" for run in runs.values()), runs
    assert runs["slipstream"]["losses"] == pytest.approx(runs["loop"]["losses"], rel=1e-5)
    assert status == int(compiled["status"] != "")


def test_different_losses_are_reported(folder):
    (folder / "tiny.py").write_text(
        CONFIG + "from test_cli_bench import Unequal\nmodel = dict(type=Unequal)\n"
    )
    assert main(["bench", "tiny.py", "--mode", "eager", *SHORT]) == 1
    assert results(folder)["runs"][1]["status"].startswith("different losses: by 0.5")


from tiny_runs import Net  # noqa: E402  # used by the configuration above


class Unequal(Net):
    """A network whose loss is 1 in float32 and 1.5 in lower precision."""

    def forward(self, inputs, targets, mode):
        import torch

        loss = super().forward(inputs, targets, mode)["loss"]
        return {"loss": 0 * loss + (1.5 if torch.is_autocast_enabled("cpu") else 1.0)}


def test_a_failed_run_is_reported_and_the_others_are_measured(folder):
    (folder / "bad.py").write_text(CONFIG.replace('type="SGD"', 'type="NoSuchOptimizer"'))
    assert main(["bench", "bad.py", "tiny.py", "--mode", "eager", "--precision", "fp32", *SHORT]) == 1
    bad, good = results(folder)["runs"]
    assert "NoSuchOptimizer" in bad["status"]
    assert good["status"] == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--warmup", "1"], "--warmup: must be at least 3"),
        (["--against", "lightnin"], "did you mean 'lightning'"),
        (["--out", "tiny.py"], "--out: cannot write to the folder"),
    ],
)
def test_invalid_options_are_rejected(arguments, message, capsys):
    assert main(["bench", "tiny.py", *arguments]) == 2
    assert message in capsys.readouterr().err
