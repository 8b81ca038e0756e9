"""Tests of a run's report: model FLOPs utilization, example predictions, and recommended workers and options."""

import base64
import io
import time
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from slipstream.hooks.report_examples import ExampleSelection
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


def pixels(example):
    image = np.array(pytest.importorskip("PIL.Image").open(io.BytesIO(base64.b64decode(example.picture))))
    return torch.from_numpy(image.reshape(-1) if image.ndim == 2 else image.reshape(-1, 3))


def test_examples_are_the_most_confident_errors_then_the_least_confident_correct_predictions(tmp_path):
    runner = classifying(tmp_path, **validating())
    record, data = made(runner), Images()
    with torch.no_grad():
        sure, guesses = runner.model.eval()(data.images).softmax(1).max(1)
    wrong = guesses != data.targets
    order = sorted(range(40), key=lambda i: (not wrong[i], -sure[i] if wrong[i] else sure[i]))[:12]
    names = data.metainfo["classes"]
    found = [(each.label, each.prediction) for each in record.examples]
    assert found == [(names[data.targets[i]], names[guesses[i]]) for i in order]
    assert [each.probability for each in record.examples] == pytest.approx(
        [sure[i].item() for i in order], abs=1e-5
    )
    image = data.images[order[0]].flatten()
    scaled = (image - image.min()) * 255 / (image.max() - image.min())
    assert torch.allclose(pixels(record.examples[0])[:, 0].float(), scaled, atol=0.51)
    text = page(runner)
    assert text.count("data:image/png;base64,") == 12
    assert f"label: {names[data.targets[order[0]]]}" in text


def selected(images, outputs, names=(), batches=1):
    selection = ExampleSelection(batches)
    selection.add(0, images, outputs)
    return selection.examples(names)


def test_color_images_keep_their_values_and_large_ones_are_reduced():
    image = torch.randint(0, 256, (3, 5, 7), dtype=torch.uint8)
    (small,) = selected([image[None], torch.tensor([0])], (torch.tensor([[2.0, 1.0]]), torch.tensor([0])))
    assert torch.equal(pixels(small), image.permute(1, 2, 0).reshape(-1, 3))
    large = torch.full((1, 3, 224, 448), 9, dtype=torch.uint8)
    (shown,) = selected(dict(inputs=large), dict(preds=torch.tensor([[2.0, 1.0]]), targets=torch.tensor([0])))
    assert pixels(shown).shape == (112 * 56, 3)
    assert pixels(shown).unique().tolist() == [9]


@pytest.mark.parametrize(
    ("batch", "outputs"),
    [
        (None, None),
        ([torch.rand(2, 4, 4, 4)], (torch.rand(2, 3), torch.tensor([0, 1]))),  # four channels
        ([torch.rand(2, 3, 4, 4)], (torch.rand(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.long))),
        ([torch.rand(3, 3, 4, 4)], (torch.rand(2, 3), torch.tensor([0, 1]))),
        ([torch.rand(2, 3, 4, 4)], (torch.rand(2, 0), torch.tensor([0, 1]))),
        ([torch.rand(2, 3, 4, 4)], "text"),
        ([], (torch.rand(2, 3), torch.tensor([0, 1]))),
    ],
)
def test_other_outputs_are_ignored(batch, outputs):
    assert selected(batch, outputs) == []


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
