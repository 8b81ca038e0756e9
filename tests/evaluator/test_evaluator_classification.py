from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerators import DEVICE, no_waiting
from slipstream.errors import DataError
from slipstream.evaluator import Accuracy

torchmetrics = pytest.importorskip("torchmetrics")


def _evaluate(preds, targets, **options):
    metric = Accuracy(**options)
    metric.process(None, {"preds": preds, "targets": targets})
    return metric.evaluate(len(targets))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**16), st.integers(1, 20), st.integers(5, 12))
def test_top_k_agrees_with_sorting_in_numpy(seed, samples, classes):
    rng = np.random.default_rng(seed)
    scores, targets = rng.standard_normal((samples, classes)), rng.integers(0, classes, samples)
    ranking = np.argsort(-scores, axis=1)
    got = _evaluate(torch.from_numpy(scores), torch.from_numpy(targets), topk=(1, 5))
    for k in (1, 5):
        right = [target in row[:k] for target, row in zip(targets, ranking, strict=True)]
        assert got[f"accuracy/top{k}"] == pytest.approx(100 * np.float64(np.mean(right)))


def test_top_1_and_top_5_accuracy_agree_with_torchmetrics():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(64, 10, generator=generator)
    targets = torch.randint(0, 10, (64,), generator=generator)
    got = _evaluate(scores, targets, topk=(1, 5))
    for k in (1, 5):
        peer = torchmetrics.classification.MulticlassAccuracy(10, top_k=k, average="micro")
        assert got[f"accuracy/top{k}"] == pytest.approx(100 * peer(scores, targets).item(), rel=1e-5)


def test_accuracy_of_zero_samples_is_nan():
    assert math.isnan(Accuracy().evaluate(0)["accuracy/top1"])


def test_invalid_targets_raise_an_error_with_their_count():
    metric = Accuracy()
    metric.process(None, (torch.eye(3), torch.tensor([0, 3, -1])))
    with pytest.raises(DataError, match="2 of 3 targets are not valid class ids"):
        metric.evaluate(3)


@pytest.mark.gpu
def test_device_counts_match_cpu_without_synchronization():
    scores, targets = torch.randn(64, 10), torch.randint(0, 10, (64,))
    metric = Accuracy(topk=(1, 5))
    on_device = scores.to(DEVICE), targets.to(DEVICE)
    metric.process(None, on_device)
    metric.evaluate(64)
    with no_waiting():
        metric.process(None, on_device)
    assert metric.evaluate(64) == _evaluate(scores, targets, topk=(1, 5))


@pytest.mark.parametrize("as_scores", [True, False])
def test_confusion_matrix_counts_pairs_of_target_and_prediction(as_scores):
    metric = Accuracy(num_classes=3)
    targets, preds = torch.tensor([0, 0, 1, 2, 2, 2]), torch.tensor([0, 1, 1, 2, 2, 0])
    for part in (slice(0, 4), slice(4, 6)):
        shown = torch.nn.functional.one_hot(preds[part], 3).float() if as_scores else preds[part]
        metric.process(None, dict(preds=shown, targets=targets[part]))
    assert metric.evaluate(6) == {"accuracy/top1": pytest.approx(100 * 4 / 6)}
    assert metric.confusion == [[1, 1, 0], [0, 1, 0], [1, 0, 2]]
    assert metric.class_names() == ["0", "1", "2"]


def evaluated(preds, targets, classes, **options):
    metric = Accuracy(**options)
    metric.dataset_meta = dict(classes=classes)
    metric.process(None, (torch.tensor(preds), torch.tensor(targets)))
    return metric, metric.evaluate(len(targets))


def test_named_classes_produce_a_confusion_matrix():
    scores = [[0.9, 0.1, 0.0], [0.1, 0.2, 0.7], [0.0, 0.8, 0.2], [0.6, 0.3, 0.1]]
    metric, _ = evaluated(scores, [0, 1, 1, 2], ("a", "b", "c"))
    assert metric.confusion == [[1, 0, 0], [0, 1, 1], [1, 0, 0]]
    assert metric.class_names() == ["a", "b", "c"]
