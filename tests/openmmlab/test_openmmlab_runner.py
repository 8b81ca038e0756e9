"""Test that Slipstream's `mmengine.runner.Runner` trains like MMEngine's, and resumes from MMEngine's checkpoints."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

SRC = str(Path(__file__).parents[2] / "src")
SCRIPT = str(Path(__file__).parent / "scripts/train_tiny.py")


# `find_spec` cannot be used: it finds Slipstream's modules once another test has imported `slipstream.openmmlab`.
needs_mmengine = pytest.mark.skipif(
    not any(metadata.distributions(name="mmengine")), reason="MMEngine is not installed"
)


def train(work_dir, *launcher, epochs=3, resume=()):
    env = {**os.environ, "PYTHONPATH": SRC}
    command = [sys.executable, *launcher, SCRIPT, str(work_dir), str(epochs), *map(str, resume)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, cwd=work_dir.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(lines[0].removeprefix("RESULT "))


def test_a_script_written_for_mmengine_trains_saves_and_finds_its_current_instances(tmp_path):
    result = train(tmp_path / "run", "-m", "slipstream.openmmlab")
    assert len(result["losses"]) == 15
    assert result["losses"][-1] < result["losses"][0]
    checkpoint = torch.load(tmp_path / "run/epoch_3.pth", weights_only=True)
    assert checkpoint["meta"]["iter"] == 15
    assert [group["lr"] for group in checkpoint["optimizer"]["param_groups"]] == pytest.approx(
        [0.005] * 4 + [0.0025] * 2  # one group for each parameter
    )


@pytest.mark.slow
@needs_mmengine
def test_losses_and_weights_equal_mmengine_in_float64(tmp_path):
    expected = train(tmp_path / "mmengine")
    result = train(tmp_path / "slipstream", "-m", "slipstream.openmmlab")
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-12)
    assert result["weights"] == pytest.approx(expected["weights"], rel=1e-10, abs=1e-12)


@pytest.mark.slow
@needs_mmengine
def test_an_mmengine_run_can_be_continued(tmp_path):
    from slipstream.checkpoint import load_checkpoint

    train(tmp_path / "mmengine")
    checkpoint = load_checkpoint(tmp_path / "mmengine/epoch_3.pth")
    assert checkpoint["meta"]["iter"] == 15
    assert checkpoint["message_hub"]["log_scalars"]["train/loss"]["count_history"] == [1] * 15
    assert checkpoint["state_dict"]["head.weight"].dtype == torch.float64


@pytest.mark.slow
@needs_mmengine
def test_an_mmengine_run_is_resumed_with_its_optimizer_and_schedulers(tmp_path, monkeypatch):
    train(tmp_path / "first", epochs=2)
    checkpoint = tmp_path / "first/epoch_2.pth"
    # MMEngine does not pass `weights_only`, and torch's default value rejects the checkpoint.
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    expected = train(tmp_path / "expected", resume=[checkpoint])
    monkeypatch.delenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    result = train(tmp_path / "rest", "-m", "slipstream.openmmlab", resume=[checkpoint])
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-12)
    assert result["weights"] == pytest.approx(expected["weights"], rel=1e-10, abs=1e-12)


@pytest.mark.slow
@needs_mmengine
def test_mmengine_resumes_from_slipstreams_checkpoint_as_from_its_own(tmp_path, monkeypatch):
    train(tmp_path / "slipstream", "-m", "slipstream.openmmlab", epochs=2)
    result = train(tmp_path / "rest", resume=[tmp_path / "slipstream/epoch_2.pth"])
    train(tmp_path / "mmengine", epochs=2)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    expected = train(tmp_path / "expected", resume=[tmp_path / "mmengine/epoch_2.pth"])
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-12)
    assert result["weights"] == pytest.approx(expected["weights"], rel=1e-10, abs=1e-12)
