"""Tests of speed options for scripts written for MMEngine, and of compiled steps whose batches contain data samples."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from mmengine.structures import BaseDataElement, LabelData
from torch import nn

from slipstream.openmmlab.speed import VARIABLE, merge_environment
from slipstream.optim import OptimWrapper
from slipstream.speed.plan import SpeedPlan
from slipstream.speed.steps import StepSpec, build_step
from slipstream.step import sum_losses

SRC = str(Path(__file__).parents[2] / "src")
SCRIPT = str(Path(__file__).parent / "scripts/train_tiny.py")


@pytest.mark.parametrize(
    ("text", "own", "expected"),
    [
        ("", {"ema": True}, {"ema": True}),
        ("precision=bf16", "auto", {"auto": True, "precision": "bf16"}),
        (
            "compile.mode=default compile.scope=step",
            {"compile": True},
            {"compile": {"mode": "default", "scope": "step"}},
        ),
        ("compile=False", {"compile": {"scope": "step"}}, {"compile": False}),
    ],
)
def test_options_from_the_environment_take_precedence(monkeypatch, text, own, expected):
    monkeypatch.setenv(VARIABLE, text)
    assert merge_environment(own) == expected


def train(tmp_path, *speed):
    env = {**os.environ, "PYTHONPATH": SRC}
    run = [SCRIPT, str(tmp_path / "run"), "3"]  # three epochs
    command = [sys.executable, "-m", "slipstream.openmmlab", *speed, *run]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, cwd=tmp_path)


@pytest.mark.slow
def test_a_script_trains_with_the_options(tmp_path):
    speed = ["ema.decay=0.9", "compile.backend=aot_eager", "compile.scope=step"]
    done = train(tmp_path, "--speed", *speed)
    assert done.returncode == 0, done.stdout + done.stderr
    log = done.stdout + done.stderr
    assert "Options: compile (speed.compile), ema (speed.ema)" in log
    assert "cannot be compiled" not in log
    checkpoint = torch.load(tmp_path / "run/epoch_3.pth", weights_only=True)
    assert checkpoint["ema_state_dict"]
    plain = train(tmp_path)
    losses = [
        json.loads(next(line for line in text.splitlines() if line.startswith("RESULT "))[7:])["losses"]
        for text in (done.stdout, plain.stdout)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(6, 3).double()

    def forward(self, inputs, data_samples):
        """Read metainfo and nested elements, as OpenMMLab's heads do."""
        metas = [sample.metainfo for sample in data_samples]
        scale = sum(meta["img_shape"][0] for meta in metas) / 8
        target = torch.stack([sample.gt.label for sample in data_samples])
        return {"loss": F.cross_entropy(self.net(inputs) * scale, target)}


def batch(number):
    """Return a batch of four samples whose file names are unique."""
    generator = torch.Generator().manual_seed(number)
    samples = []
    for i in range(4):
        meta = {"img_path": f"{number}/{i}.png", "sample_idx": 4 * number + i, "img_shape": (2, 2)}
        sample = BaseDataElement(metainfo=meta)
        sample.gt = LabelData(label=torch.randint(0, 3, (), generator=generator))
        samples.append(sample)
    return {"inputs": torch.randn(4, 6, generator=generator, dtype=torch.float64), "data_samples": samples}


def test_one_graph_runs_for_all_batches_of_data_samples_without_dynamo():
    torch._dynamo.reset()
    model, problems = Classifier(), []
    optim = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    spec = StepSpec(model, optim, lambda module, inputs: sum_losses(module(**inputs)), lambda inputs: inputs)
    how = {"scope": "step", "backend": "aot_eager", "cache": False}
    step = build_step(spec, SpeedPlan.read({"compile": how}), problems.append)
    losses = [float(step(batch(number))["loss"]) for number in range(8)]
    assert problems == []
    assert len(step._captured.direct._calls) == 1  # called without Dynamo, although the file names differ

    other = Classifier()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    for number, found in enumerate(losses):
        data = batch(number)
        target = torch.stack([sample.gt.label for sample in data["data_samples"]])
        loss = F.cross_entropy(other.net(data["inputs"]), target)
        assert found == pytest.approx(loss.item(), rel=1e-12)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
