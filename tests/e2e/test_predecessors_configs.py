"""Test that examples from MMEngine's guide to faster training run unchanged, except for the package name."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slipstream.evaluator import BaseMetric
from slipstream.hooks import Hook
from slipstream.model import BaseModel
from slipstream.registry import HOOKS, MODELS
from slipstream.runner import Runner


@pytest.fixture
def train_dataloader_cfg():
    images = torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(images, images.mean((1, 2, 3)).gt(0).long())
    return dict(
        batch_size=8,
        dataset=data,
        sampler=dict(type="DefaultSampler", shuffle=True),
        collate_fn=dict(type="default_collate"),
    )


class ResNet18(BaseModel):
    """The guide's model, written as in the tutorial: batches are tuples, and forward has three modes."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, imgs, labels, mode):
        x = self.head(F.relu(self.bn(self.conv(imgs))).mean((2, 3)))
        if mode == "loss":
            return {"loss": F.cross_entropy(x, labels)}
        if mode == "predict":
            return x, labels
        return x


class Accuracy(BaseMetric):
    """The tutorial's metric. Predictions are the tuple that forward returns."""

    def process(self, data_batch, data_samples):
        score, gt = data_samples
        self.results.append({"batch_size": len(gt), "correct": (score.argmax(dim=1) == gt).sum().cpu()})

    def compute_metrics(self, results):
        total = sum(item["batch_size"] for item in results)
        return dict(accuracy=100 * sum(item["correct"] for item in results) / total)


def test_mixed_precision_example_runs_unchanged(tmp_path, train_dataloader_cfg):
    runner = Runner(
        model=ResNet18(),
        work_dir=str(tmp_path),
        train_dataloader=train_dataloader_cfg,
        optim_wrapper=dict(
            type="AmpOptimWrapper",
            # If you want to use bfloat16, uncomment the following line
            # dtype='bfloat16',  # valid values: ('float16', 'bfloat16', None)
            optimizer=dict(type="SGD", lr=0.001, momentum=0.9),
        ),
        train_cfg=dict(by_epoch=True, max_epochs=3),
    )
    runner.train()
    assert runner.iter == 9
    assert runner.optim_wrapper.loss_scaler is None  # bfloat16 on the CPU requires no loss scale
    assert (tmp_path / "epoch_3.pth").is_file()


@pytest.mark.slow
def test_compilation_example_trains_and_validates(tmp_path, train_dataloader_cfg):
    def run(cfg):
        torch.manual_seed(0)
        runner = Runner(
            model=ResNet18(),
            work_dir=str(tmp_path),
            train_dataloader=train_dataloader_cfg,
            train_cfg=dict(by_epoch=True, max_epochs=2),
            optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.001, momentum=0.9)),
            val_dataloader=dict(batch_size=8, dataset=train_dataloader_cfg["dataset"]),
            val_cfg=dict(),
            val_evaluator=dict(type=Accuracy),
            randomness=dict(seed=0),
            cfg=cfg,
        )
        return runner, runner.train().state_dict()

    _, eager = run(None)
    runner, compiled = run(dict(compile=True))
    assert runner.model._compiled_call_impl is not None
    assert eager.keys() == compiled.keys()
    for name, value in eager.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-5, atol=1e-6)


def test_complete_tutorial_trains_with_registered_components(tmp_path, train_dataloader_cfg):
    seen = []

    @HOOKS.register_module(force=True)
    class CheckInvalidLossHook(Hook):
        def __init__(self, interval=50):
            self.interval = interval

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            if self.every_n_train_iters(runner, self.interval):
                seen.append(torch.isfinite(outputs["loss"]).item())

    MODELS.register_module(name="TutorialNet", module=ResNet18, force=True)
    runner = Runner.from_cfg(
        dict(
            model=dict(type="TutorialNet"),
            work_dir=str(tmp_path),
            train_dataloader=train_dataloader_cfg,
            train_cfg=dict(by_epoch=True, max_epochs=2, val_interval=1),
            optim_wrapper=dict(type="OptimWrapper", optimizer=dict(type="Adam", lr=0.001)),
            param_scheduler=[
                dict(
                    type="LinearLR",
                    start_factor=0.1,
                    by_epoch=True,
                    begin=0,
                    end=1,
                    convert_to_iter_based=True,
                ),
                dict(type="MultiStepLR", by_epoch=True, milestones=[1], gamma=0.1),
            ],
            val_dataloader=dict(
                batch_size=8,
                dataset=train_dataloader_cfg["dataset"],
                sampler=dict(type="DefaultSampler", shuffle=False),
                collate_fn=dict(type="default_collate"),
            ),
            val_cfg=dict(),
            val_evaluator=dict(type=Accuracy),
            custom_hooks=[dict(type="CheckInvalidLossHook", interval=2)],
            default_scope="mmengine",
        )
    )
    runner.train()
    assert seen == [True] * 3
    assert "val/accuracy" in runner.message_hub.log_scalars
