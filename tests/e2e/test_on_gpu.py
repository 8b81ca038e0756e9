"""Tests of training runs on an accelerator, with speed options and without host-device syncs between log lines."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from accelerators import BACKEND, DEVICE, IS_CUDA, cuda_only, no_waiting
from slipstream.hooks import Hook
from slipstream.model import BaseModel
from slipstream.runner import Runner

pytestmark = pytest.mark.gpu


class Net(BaseModel):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2)
        )

    def forward(self, images, labels, mode):
        return {"loss": F.cross_entropy(self.body(images), labels)}


class ForbidWaiting(Hook):
    """A hook that turns host-device syncs between the second step and the last step into errors."""

    priority = "LOWEST"

    def before_train(self, runner):
        self.context = no_waiting()

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if batch_idx == 1:
            self.context.__enter__()
        elif batch_idx == 14:  # step 16 is the last one and writes a log line
            self.context.__exit__(None, None, None)


def run(tmp_path, hooks=(), speed=None, max_epochs=2, resume=False, **optim):
    torch.manual_seed(0)
    images = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(images, (images.mean((1, 2, 3)) > 0).long())
    runner = Runner(
        model=Net(),
        work_dir=str(tmp_path),
        train_dataloader=dict(batch_size=4, dataset=data, sampler=dict(type="DefaultSampler", shuffle=True)),
        train_cfg=dict(by_epoch=True, max_epochs=max_epochs),
        optim_wrapper=dict(
            optimizer=dict(type="SGD", lr=0.05, momentum=0.9), clip_grad=dict(max_norm=5.0), **optim
        ),
        param_scheduler=dict(type="CosineAnnealingLR", by_epoch=True, convert_to_iter_based=True),
        custom_hooks=[dict(type="EMAHook", momentum=0.01), *hooks],
        default_hooks=dict(logger=dict(type="LoggerHook", interval=1000)),
        resume=resume,
        randomness=dict(seed=0),
        speed=speed,
    )
    runner.train()
    return runner


@pytest.fixture(autouse=True)
def _exact_float32(monkeypatch):
    """Disable TF32, which convolutions use by default on CUDA, and restore the sync mode after the test."""
    if IS_CUDA:
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    yield
    if IS_CUDA:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("optim", [{}, dict(type="AmpOptimWrapper", dtype="bfloat16")])
def test_there_is_no_synchronization_between_log_intervals(tmp_path, optim):
    run(tmp_path, [ForbidWaiting()], max_epochs=1, **optim)


@pytest.mark.parametrize("options", [dict(dtype="float16", loss_scale=1024.0), dict(dtype="bfloat16")])
def test_mixed_precision_is_close_to_full_precision(tmp_path, options):
    """With this loss scale, no float16 step is skipped."""
    full = run(tmp_path / "full").model.state_dict()
    mixed = run(tmp_path / "mixed", type="AmpOptimWrapper", **options).model.state_dict()
    for name, value in full.items():
        torch.testing.assert_close(
            mixed[name], value, rtol=0.06, atol=0.06, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    "options",
    [{}, dict(nan_guard=True), pytest.param(dict(nan_guard=True, cuda_graph=True), marks=cuda_only)],
)
def test_compiled_training_matches_eager(tmp_path, options):
    eager = run(tmp_path / "eager").model.state_dict()
    runner = run(tmp_path / "compiled", speed=dict(compile=dict(backend=BACKEND), **options))
    assert runner.step.uses_graph
    compiled = runner.model.state_dict()
    for name, value in eager.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-3, atol=1e-4)


def test_resumed_run_ends_with_the_same_weights(tmp_path):
    whole = run(tmp_path / "whole").model.state_dict()
    resumed = run(tmp_path / "resumed", resume=tmp_path / "whole" / "epoch_1.pth")
    assert resumed.iter == 32
    for name, value in whole.items():
        torch.testing.assert_close(resumed.model.state_dict()[name], value, rtol=0, atol=1e-6)


def test_torchrun_assigns_a_device_to_each_process(run, tmp_path):
    example = Path(__file__).resolve().parents[2] / "examples/distributed_training.py"
    count = str(min(torch.accelerator.device_count(), 2))
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}")
    arguments = ("--launcher", "pytorch", "--epochs", "1", "--batches", "3", "--work-dir", str(tmp_path))
    run(*torchrun, str(example), *arguments)
    log = next(tmp_path.glob("*/*.log")).read_text()
    assert f"backend {dict(cuda='nccl', npu='hccl', xpu='xccl')[DEVICE.type]}" in log
    assert f"world_size {count}" in log
    assert f"device {DEVICE.type}:0" in log
