"""Tests of `slipstream export`: without Slipstream, the exported file computes the same scores as the model."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from slipstream import accelerate
from slipstream.cli.export import _check_predictions
from slipstream.cli.main import main
from slipstream.errors import ModelError
from slipstream.registry import MODELS

ALONE = """
import sys
sys.modules["slipstream"] = None  # importing it would fail
import numpy as np
images = np.load("images.npy")
kind, file = sys.argv[1:]
if kind == "onnx":
    import onnxruntime
    scores = onnxruntime.InferenceSession(file).run(None, {"images": images})[0]
else:
    import torch
    scores = torch.export.load(file).module()(torch.from_numpy(images)).detach().numpy()
np.save("scores.npy", scores)
"""
SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}
REQUIRED = {"onnx": ("onnx", "onnxscript", "onnxruntime")}


class Strided(torch.nn.Module):
    """A network with a stride of 2 and an auxiliary output, so the exporter must select and resize the scores."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.norm = torch.nn.BatchNorm2d(4)

    def forward(self, images):
        scores = self.norm(self.conv(images))
        return scores, scores * 2


class OneChannel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 1, 3, padding=1)

    def forward(self, images):
        return self.conv(images)


class Vector(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(5, 3)

    def forward(self, inputs):
        return self.linear(inputs)


@pytest.fixture(scope="module", autouse=True)
def _registered():
    classes = (Strided, OneChannel, Vector)
    for cls in classes:
        MODELS.register_module(module=cls)
    yield
    for cls in classes:
        MODELS.module_dict.pop(cls.__name__)


NORMALIZED = [
    dict(type="SegRescale", scale_factor=0.5),
    dict(type="SegStandardize", max_value=255),
    dict(type="SegNormalize", mean=[0.4, 0.5, 0.6], std=[0.2, 0.3, 0.4]),
]


@pytest.fixture
def write_run(tmp_path, monkeypatch):
    """Return a function that writes `run.pth` with random weights and returns the model."""
    monkeypatch.chdir(tmp_path)

    def write(model, transforms=()):
        cfg = dict(model=model, val_dataloader=dict(dataset=dict(transforms=list(transforms))))
        torch.manual_seed(0)
        built = MODELS.build(model).eval()
        for module in built.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
        meta = dict(cfg=yaml.safe_dump(cfg), epoch=1, dataset_meta=dict(classes=["a", "b", "c", "d"]))
        torch.save(dict(meta=meta, state_dict=built.state_dict()), "run.pth")
        return built

    return write


@pytest.fixture
def run_alone(run):
    """Return a function that runs the exported file in a process that cannot import Slipstream."""

    def scores(kind, images):
        np.save("images.npy", images)
        run("-c", ALONE, kind, f"run{SUFFIXES[kind]}")
        return np.load("scores.npy")

    return scores


def export(kind, *options):
    for name in REQUIRED.get(kind, ()):
        pytest.importorskip(name)
    return main(["export", "run.pth", "--to", kind, *options])


@pytest.mark.parametrize("kind", SUFFIXES)
@pytest.mark.parametrize("place", ["preprocessor", "transforms"])
def test_the_exported_file_returns_the_models_scores_without_slipstream(
    kind, place, write_run, run_alone, capsys
):
    normalized = place == "transforms"
    before = (
        {} if normalized else dict(mean=[100, 110, 120], std=[50, 60, 70], pad_size_divisor=16, pad_value=1)
    )
    model = dict(
        type="Segmentor",
        network=dict(type="Strided"),
        data_preprocessor=dict(type="ImgDataPreprocessor", **before),
    )
    built = write_run(model, NORMALIZED if normalized else ())
    sizes = ("3x32x48",) if normalized else ("3x37x51", "--fixed-size")
    if not normalized:
        assert export(kind, "--shape", "3x32x48") == 2
        assert "--fixed-size: is required" in capsys.readouterr().err
    assert export(kind, "--shape", *sizes) == 0
    assert "Largest difference from the model's output" in capsys.readouterr().out
    images = np.random.default_rng(0).integers(0, 256, (3, 3, 37, 51)).astype(np.float32)
    # The expected scores, computed by hand from the definitions of normalization and padding.
    mean, std = ([0.4, 0.5, 0.6], [0.2, 0.3, 0.4]) if normalized else ([100, 110, 120], [50, 60, 70])
    pixels = images / 255 if normalized else images
    inputs = (pixels - np.array(mean).reshape(3, 1, 1)) / np.array(std).reshape(3, 1, 1)
    if not normalized:
        inputs = np.pad(inputs, ((0, 0), (0, 0), (0, 11), (0, 13)), constant_values=1)
    with torch.no_grad():
        scores = built.network(torch.from_numpy(inputs).float())[0]
        scores = torch.nn.functional.interpolate(scores, inputs.shape[-2:], mode="bilinear")[..., :37, :51]
    np.testing.assert_allclose(run_alone(kind, images), scores.numpy(), atol=2e-4)
    described = json.loads(Path(f"run{SUFFIXES[kind]}.json").read_text())
    assert described["classes"] == ["a", "b", "c", "d"]
    assert described["input"]["shape"] == (["N", 3, "H", "W"] if normalized else ["N", 3, 37, 51])
    assert described["transforms_before"] == (NORMALIZED[:1] if normalized else [])


def test_average_of_a_network_that_was_trained_in_a_custom_loop_is_exported(
    tmp_path, monkeypatch, run_alone, capsys
):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    network = Vector()
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    step = accelerate(network, optimizer, torch.nn.functional.cross_entropy, dict(ema=dict(type="swa")))
    weights = []
    for _ in range(3):
        step((torch.randn(8, 5), torch.randint(0, 3, (8,))))
        weights.append(network.linear.weight.detach().clone())
    step.save("run.pth")
    with step.averaged() as average:
        torch.save(average.state_dict(), "average.pth")
    Path("model.py").write_text(
        "model = dict(type='Classifier', network=dict(type='Vector'))\nwork_dir = 'w'\n"
    )
    inputs = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    expected = inputs @ torch.stack(weights).mean(0).numpy().T
    for checkpoint in ("average.pth", "run.pth"):
        command = [
            "export",
            checkpoint,
            "--config",
            "model.py",
            "--to",
            "torch",
            "--shape",
            "5",
            "--out",
            "run.pt2",
        ]
        assert main(command) == 0
        scores = run_alone("torch", inputs)
        # The difference between two inputs does not contain the bias.
        np.testing.assert_allclose(scores - scores[:1], expected - expected[:1], atol=1e-5)
        assert "as the network expects" in json.loads(Path("run.pt2.json").read_text())["values"]
    assert "run.pth (average of the weights)" in capsys.readouterr().out


def test_vector_classifiers_are_exported_with_a_shape(write_run, run_alone, capsys):
    built = write_run(dict(type="Classifier", network=dict(type="Vector")))
    assert export("torch") == 2
    assert "--shape" in capsys.readouterr().err
    assert export("torch", "--shape", "5") == 0
    inputs = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    expected = (
        inputs @ built.network.linear.weight.detach().numpy().T + built.network.linear.bias.detach().numpy()
    )
    np.testing.assert_allclose(run_alone("torch", inputs), expected, atol=1e-5)


def test_one_output_channel_is_exported(write_run):
    before = dict(type="ImgDataPreprocessor", mean=[127.5] * 3, std=[50] * 3)  # scores of both signs
    write_run(dict(type="Segmentor", network=dict(type="OneChannel"), data_preprocessor=before))
    assert export("torch", "--shape", "3x32x48") == 0


def test_predictions_of_one_channel_are_compared_by_their_sign():
    scores = torch.tensor([[[[-2.0, -1e-6, 0.0, 3.0]]]])
    images = torch.zeros(1, 3, 1, 4)

    def check(*classes):
        preds = torch.tensor([[classes]])
        _check_predictions(
            SimpleNamespace(val_step=lambda batch: {"preds": preds}), None, images, scores, 1e-3
        )

    check(0, 0, 1, 1)
    check(0, 1, 1, 1)  # the score is 0, up to rounding
    for classes in ((1, 0, 1, 1), (0, 0, 1, 0)):
        with pytest.raises(ModelError, match="predict different classes"):
            check(*classes)


def test_a_file_that_differs_from_the_model_is_not_kept(write_run, tmp_path, capsys, monkeypatch):
    def write_wrong(network, example, dynamic, file):
        file.touch()
        return lambda images: 1.01 * network(images)

    write_run(dict(type="Segmentor", network=dict(type="OneChannel")))
    monkeypatch.setattr("slipstream.cli.export._write_torch", write_wrong)
    assert export("torch", "--shape", "3x32x48") == 1
    assert "shape (2, 3, 32, 48) differs from the model's by" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"run.pth"}
