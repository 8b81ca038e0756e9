"""Small training runs, optionally with validation, and the datasets, metrics and hooks that they use."""

import json
import random
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from slipstream.evaluator import BaseMetric
from slipstream.hooks import Hook
from slipstream.model import BaseModel
from slipstream.runner import Runner

LOCAL = dict(type="Visualizer", vis_backends=[dict(type="LocalVisBackend")])


def samples(count=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    return inputs, inputs[:, :3].argmax(1)


class Noisy(Dataset):
    """A dataset that, like those of many users, adds random numbers from the global generators to its samples."""

    metainfo: ClassVar = dict(classes=("a", "b", "c"))

    def __init__(self, count=40):
        self.inputs, self.targets = samples(count)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        noise = torch.randn(4) + np.random.rand() + random.random()
        return self.inputs[index] + 0.1 * noise, self.targets[index]


class Net(BaseModel):
    def __init__(self, dropout=0.0, norm=False):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(8, 3)

    def forward(self, inputs, targets, mode):
        scores = self.last(self.dropout(F.relu(self.norm(self.first(inputs)))))
        if mode == "loss":
            return {"loss": F.cross_entropy(scores, targets)}
        return (scores, targets) if mode == "predict" else scores


class Accuracy(BaseMetric):
    def process(self, data_batch, data_samples):
        scores, targets = data_samples
        self.results += (scores.argmax(1) == targets).float().tolist()

    def compute_metrics(self, results):
        return {"acc": sum(results) / len(results)}


class Scripted(BaseMetric):
    """A metric that reports predefined values, one per validation."""

    def __init__(self, values, name="acc", **kwargs):
        super().__init__(**kwargs)
        self.values, self.name = list(values), name

    def process(self, data_batch, data_samples):
        self.results.append(0)

    def compute_metrics(self, results):
        return {self.name: self.values.pop(0)}


class Losses(Hook):
    """A hook that stores the loss of every step by step number."""

    def __init__(self):
        self.by_iter = {}

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.by_iter[runner.iter + 1] = outputs["loss"].clone()


class StoppedError(Exception):
    """The error that `Stop` raises."""


class Stop(Hook):
    """A hook that raises `StoppedError` after a step, in the validation after it, or at the end of its epoch."""

    priority = "LOWEST"

    def __init__(self, iteration, stage="after_train_iter"):
        self.iteration, self.stage = iteration, stage

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if self.stage == "after_train_iter" and runner.iter + 1 == self.iteration:
            raise StoppedError

    def after_train_epoch(self, runner):
        if self.stage == "after_train_epoch" and runner.iter == self.iteration:
            raise StoppedError

    def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if self.stage == "after_val_iter" and runner.iter == self.iteration:
            raise StoppedError


def loader(dataset=None, batch_size=8, shuffle=True, sampler="DefaultSampler", **options):
    return dict(
        batch_size=batch_size,
        dataset=TensorDataset(*samples()) if dataset is None else dataset,
        sampler=dict(type=sampler, shuffle=shuffle),
        collate_fn=dict(type="default_collate"),
        **options,
    )


def training(work_dir, **changes):
    """Return the arguments of a Runner that trains for two epochs of five steps."""
    return {
        "model": dict(type=Net),
        "work_dir": str(work_dir),
        "train_dataloader": loader(),
        "train_cfg": dict(by_epoch=True, max_epochs=2),
        "optim_wrapper": dict(optimizer=dict(type="SGD", lr=0.1)),
        "visualizer": LOCAL,
        "randomness": dict(seed=3),
        "log_level": "ERROR",
        **changes,
    }


def validation(metric=None, **cfg):
    return {
        "val_dataloader": loader(shuffle=False),
        "val_cfg": cfg,
        "val_evaluator": metric or dict(type=Accuracy),
    }


def run(work_dir, **changes):
    runner = Runner(**training(work_dir, **changes))
    runner.train()
    return runner


def scalars(runner):
    """Return a run's logged JSON lines as dicts."""
    lines = (Path(runner.log_dir) / "vis_data" / "scalars.json").read_text().splitlines()
    return [json.loads(line) for line in lines]


def weights(runner):
    return {name: value.clone() for name, value in runner.model.state_dict().items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
