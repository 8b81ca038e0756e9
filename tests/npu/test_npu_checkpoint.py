"""Tests of checkpoints from an NPU. Runs resume exactly on an NPU, and within a tolerance on a machine without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent.parent
SCRIPT = """
import json, sys
sys.path[:0] = sys.argv[3:]
import torch
from tiny_runs import *
torch.set_num_threads(1)
folder, resume = sys.argv[1:3]
runner = Runner(
    Net(norm=True), folder, dict(dataset=TensorDataset(*samples()), batch_size=8, sampler=dict(type="DefaultSampler")),
    train_cfg=dict(by_epoch=True, max_epochs=4), optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.01, eps=1e-3)),
    speed=dict(ema=True), resume=resume, randomness=dict(seed=0), log_level="ERROR",
    default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1)),
)
runner.train()
print(json.dumps([str(runner.device), {n: t.tolist() for n, t in runner.model.state_dict().items()}]))
"""


def train(folder, resume=None, on_npu=True):
    """Train in a separate process, and return the device and the final weights."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    if not on_npu:
        npu = str(Path(sys.modules["torch_npu"].__file__).parent.parent)
        paths = [path for path in environment["PYTHONPATH"].split(os.pathsep) if path != npu]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    arguments = [sys.executable, "-c", SCRIPT, str(folder), str(resume or ""), str(TESTS)]
    ended = subprocess.run(
        arguments, capture_output=True, text=True, env=environment, check=False, timeout=100
    )
    assert ended.returncode == 0, ended.stderr
    device, weights = json.loads(ended.stdout.splitlines()[-1])
    return device, {name: torch.tensor(value) for name, value in weights.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    device, weights = train(folder)
    assert device == "npu:0"
    return folder, weights


@pytest.mark.parametrize("on_npu", [True, False], ids=["npu", "cpu"])
def test_resumed_run_ends_with_the_same_weights(whole, tmp_path, on_npu):
    folder, weights = whole
    device, resumed = train(tmp_path, folder / "epoch_2.pth", on_npu)
    assert device == ("npu:0" if on_npu else "cpu")
    torch.testing.assert_close(resumed, weights, rtol=0, atol=0 if on_npu else 1e-6)
