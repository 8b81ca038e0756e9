"""Tests of a run's report: model FLOPs utilization, example predictions, and recommended workers and options."""

import time
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn
from torch.utils.data import Dataset

from slipstream.model import Classifier
from slipstream.report import read_run
from tiny_runs import loader, run, validation

CONVOLUTION, LINEAR = 2 * 4 * 4 * 4 * 9, 2 * 64 * 3
"""Operations that each layer in `network` performs in the forward pass of one sample. A multiply-add counts as two."""


class Images(Dataset):
    """Gray images. The class is the index of the brightest of three stripes."""

    metainfo: ClassVar = dict(classes=("left", "middle", "right"))

    def __init__(self, count=40, delay=0.0):
        generator = torch.Generator().manual_seed(5)
        self.images = torch.rand(count, 1, 6, 6, generator=generator)
        self.targets = self.images.reshape(count, 6, 3, 2).mean((1, 3)).argmax(1)
        self.delay = delay

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        time.sleep(self.delay)
        return self.images[index], int(self.targets[index])


def network():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 3)
    )


def classifying(work_dir, report=None, **changes):
    torch.manual_seed(0)
    values = {
        "model": Classifier(network()),
        "train_dataloader": loader(Images()),
        "default_hooks": dict(checkpoint=None, report=dict(type="ReportHook", **(report or {}))),
        **changes,
    }
    return run(work_dir, **values)


def validating(metric=None):
    return {**validation(metric or dict(type="Accuracy")), "val_dataloader": loader(Images(), shuffle=False)}


def made(runner):
    return read_run(Path(runner.log_dir))


def page(runner):
    return (Path(runner.log_dir) / "report.html").read_text(encoding="utf-8")


# ---- model FLOPs utilization --------------------------------------------------------------------------


# ---- example predictions ------------------------------------------------------------------------------


def test_accuracy_produces_a_confusion_matrix_if_the_dataset_names_its_classes(tmp_path):
    runner = classifying(tmp_path, **validating())
    (confusion,) = made(runner).confusions
    data = Images()
    with torch.no_grad():
        guesses = runner.model.eval()(data.images).argmax(1)
    expected = torch.zeros(3, 3, dtype=torch.long)
    for target, guess in zip(data.targets, guesses, strict=True):
        expected[target, guess] += 1
    assert confusion.matrix == expected.tolist()
    assert confusion.classes == ["left", "middle", "right"]
