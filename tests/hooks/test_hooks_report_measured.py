"""Tests of a run's report: model FLOPs utilization, example predictions, and recommended workers and options."""

import base64
import io
import time
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from slipstream.errors import ConfigError
from slipstream.hooks import ReportHook
from slipstream.hooks.report_examples import ExampleSelection
from slipstream.model import Classifier
from slipstream.report import read_run
from slipstream.report.advice import mean_speed
from slipstream.report.utilization import utilization
from slipstream.runner import Runner
from slipstream.tune import api
from slipstream.tune.jobs import Setting
from slipstream.tune.search import Outcome
from slipstream.tune.statistics import Estimate
from tiny_runs import assert_same, loader, run, training, validation, weights

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


def test_utilization_is_the_models_operations_per_second_divided_by_the_peak(tmp_path):
    runner = classifying(tmp_path, dict(peak_tflops=0.25))
    record = made(runner)
    assert record.compute.flops_per_sample == 2 * CONVOLUTION + 3 * LINEAR  # images have no gradient
    assert record.compute.peak_flops == 0.25e12
    assert record.compute.precision == "fp32"
    speed = mean_speed(record)
    assert utilization(record) == pytest.approx((2 * CONVOLUTION + 3 * LINEAR) * speed / 0.25e12)
    assert "0.25 TFLOP/s (fp32, default_hooks.report.peak_tflops)" in page(runner)


def test_peak_has_the_precision_of_autocast(tmp_path):
    record = made(classifying(tmp_path, dict(peak_tflops=1.0), speed=dict(precision="bf16")))
    assert record.compute.precision == "bf16"
    assert record.compute.flops_per_sample > 0


def test_utilization_is_unknown_without_a_peak(tmp_path):
    runner = classifying(tmp_path)
    record = made(runner)
    assert utilization(record) is None
    assert record.compute.flops_per_sample == 0
    assert "the peak throughput of the CPU in fp32 is not in the accelerator table" in record.compute.problem
    assert "Model FLOPs utilization: unknown, because the peak throughput of the CPU" in page(runner)


def test_counting_does_not_change_the_run(tmp_path):
    one = weights(classifying(tmp_path / "without"))
    other = classifying(tmp_path / "with", dict(peak_tflops=1.0))
    assert_same(weights(other), one)
    assert not other.model.data_preprocessor._forward_hooks


@pytest.mark.parametrize(
    "speed",
    [
        dict(compile=dict(scope="step", backend="eager")),
        dict(compile=dict(scope="model", backend="eager")),
        dict(channels_last=True, activation_checkpointing=["network.0"]),
        dict(ema=dict(decay=0.9), accumulate=2),
    ],
)
def test_options_do_not_change_the_operation_count_of_the_model(tmp_path, speed):
    record = made(classifying(tmp_path, dict(peak_tflops=1.0), speed=speed))
    assert record.status == "finished"
    assert record.compute.problem == ""
    assert record.compute.flops_per_sample == 2 * CONVOLUTION + 3 * LINEAR


def test_gradients_of_parameters_outside_the_optimizer_are_not_counted(tmp_path):
    model = Classifier(network())
    head = torch.optim.SGD(model.network[-1].parameters(), lr=0.1)
    record = made(classifying(tmp_path, dict(peak_tflops=1.0), model=model, optim_wrapper=head))
    assert record.compute.flops_per_sample == CONVOLUTION + 2 * LINEAR


def test_option_with_several_gradients_per_batch_has_no_operation_count(tmp_path):
    record = made(classifying(tmp_path, dict(peak_tflops=1.0), speed=dict(sam=dict(rho=0.05))))
    assert record.compute.problem == "an option computes the gradients of a batch more than once"


def test_loss_that_reads_values_makes_the_utilization_unknown(tmp_path):
    class Selective(nn.Module):
        def forward(self, scores, targets):
            losses = F.cross_entropy(scores, targets, reduction="none")
            return losses[losses >= losses.median().item()].mean()

    record = made(classifying(tmp_path, dict(peak_tflops=1.0), model=Classifier(network(), Selective())))
    assert record.status == "finished"
    problem = "the operations cannot be counted: the model or the loss depends on tensor values"
    assert problem in record.compute.problem


def test_model_with_its_own_training_step_has_no_operation_count(tmp_path):
    class Own(Classifier):
        def train_step(self, data, optim_wrapper):
            return super().train_step(data, optim_wrapper)

    record = made(classifying(tmp_path, dict(peak_tflops=1.0), model=Own(network())))
    assert record.compute.problem == "Own defines its own training step"


@pytest.mark.parametrize("options", [dict(peak_tflops=0), dict(peak_tflops="many"), dict(probe_workers=2)])
def test_invalid_options_are_rejected(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        ReportHook(**options)


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
    assert torch.allclose(pixels(record.examples[0]).float(), scaled, atol=0.51)
    text = page(runner)
    assert text.count("data:image/png;base64,") == 12
    assert f"label: {names[data.targets[order[0]]]}" in text


def test_runs_without_validation_and_runs_of_other_tasks_have_no_examples(tmp_path):
    assert made(classifying(tmp_path / "none")).examples == []
    assert made(run(tmp_path / "vectors", **validation())).examples == []  # its inputs are vectors


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


def test_class_ids_have_no_probability_and_scores_that_are_probabilities_are_kept():
    images, targets = [torch.rand(2, 1, 4, 4), None], torch.tensor([1, 0])
    ids = selected(images, (torch.tensor([1, 1]), targets), ["a", "b"])
    assert [(each.label, each.prediction, each.probability) for each in ids] == [
        ("a", "b", None),
        ("b", "b", None),
    ]
    scores = selected(images, (torch.tensor([[0.25, 0.75], [0.125, 0.875]]), targets))
    assert [(each.label, each.prediction, each.probability) for each in scores] == [
        ("0", "1", 0.875),
        ("1", "1", 0.75),
    ]


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


def test_nonfinite_scores_and_images_can_be_drawn():
    images = torch.tensor([float("nan"), float("inf"), 0.0, 1.0]).reshape(1, 1, 2, 2)
    (shown,) = selected([images], (torch.full((1, 2), float("nan")), torch.tensor([1])))
    assert shown.probability is None


def test_at_most_32_batches_are_read():
    class Counting(dict):
        reads = 0

        def get(self, key):
            self.reads += 1
            return super().get(key)

    for batches in (10, 32, 33, 1000, None):
        selection, batch = ExampleSelection(batches), Counting()
        for index in range(batches or 1000):
            selection.add(index, batch, None)
        assert min(batches or 1000, 32) // 2 <= batch.reads <= 32


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


# ---- recommendations ----------------------------------------------------------------------------------



def tune_result(**changes):
    values = dict(
        setting=Setting({"channels_last": True}),
        adopted=["channels_last"],
        total=Estimate(1.5, 1.4, 1.6, 9, 0.99),
    )
    return Outcome(**{**values, **changes})


class StoredSearch:
    outcome = tune_result()

    def __init__(self, *args):
        pass

    def run(self):
        return self.outcome


@pytest.fixture
def stored(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(api, "Search", StoredSearch)


def test_stored_result_of_tune_is_recommended_for_the_same_configuration(tmp_path, stored):
    cfg = training(tmp_path / "tuned", optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)))
    api.tune_config(cfg, budget="7m", options=["channels_last", "fused"])
    runner = run(tmp_path / "same")
    (found,) = made(runner).tuned
    assert (found.adopted, found.ratio, found.low, found.high) == (["channels_last"], 1.5, 1.4, 1.6)
    assert (
        "with channels_last, training steps run 1.50 times as fast as without these options (1.40 to 1.60;"
        in page(runner)
    )
    assert made(run(tmp_path / "options", speed=dict(fused=True))).tuned == []
    assert made(run(tmp_path / "loader", train_dataloader=loader(batch_size=4))).tuned == []


def test_run_without_stored_results_does_not_describe_its_configuration(tmp_path, stored, monkeypatch):
    monkeypatch.setattr(
        Runner, "stored_tuning", lambda runner: pytest.fail("the configuration was described")
    )
    assert made(run(tmp_path / "run")).tuned == []


def test_stored_result_without_an_adopted_option_is_not_recommended(tmp_path, stored, monkeypatch):
    monkeypatch.setattr(StoredSearch, "outcome", Outcome())
    api.tune_config(training(tmp_path / "tuned"))
    assert made(run(tmp_path / "same")).tuned == []


def test_error_in_a_measurement_does_not_prevent_the_report(tmp_path, stored, monkeypatch):
    def fail(runner):
        raise ValueError("unreadable")

    api.tune_config(training(tmp_path / "tuned"))
    monkeypatch.setattr(Runner, "stored_tuning", fail)
    runner = run(tmp_path / "run")
    assert made(runner).status == "finished"
    assert made(runner).tuned == []
