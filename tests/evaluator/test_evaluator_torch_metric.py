from __future__ import annotations

import pytest
import torch

from slipstream.evaluator import TorchMetric

torchmetrics = pytest.importorskip("torchmetrics")
MulticlassAccuracy = torchmetrics.classification.MulticlassAccuracy

SCORES = torch.eye(4)
TARGETS = torch.tensor([0, 1, 2, 0])


def _accuracy(**options):
    return MulticlassAccuracy(num_classes=4, average="micro", **options)


def test_value_is_reported_under_the_class_name():
    metric = TorchMetric(_accuracy())
    metric.process(None, (SCORES, TARGETS))
    metric.process(None, {"preds": SCORES[:1], "targets": TARGETS[3:], "extra": 1})
    value = metric.evaluate(5)
    assert value == {"MulticlassAccuracy": pytest.approx(4 / 5)}
    assert type(value["MulticlassAccuracy"]) is float


def test_evaluate_resets_the_metric():
    metric = TorchMetric(_accuracy())
    metric.process(None, (SCORES, torch.tensor([1, 2, 3, 0])))
    metric.evaluate(4)
    metric.process(None, (SCORES, torch.arange(4)))
    assert metric.evaluate(4) == {"MulticlassAccuracy": 1.0}


def test_name_and_prefix_are_used():
    metric = TorchMetric(_accuracy(), name="acc", prefix="val")
    metric.process(None, (SCORES, TARGETS))
    assert list(metric.evaluate(4)) == ["val/acc"]


def test_vectors_are_flattened():
    metric = TorchMetric(MulticlassAccuracy(num_classes=4, average=None))
    metric.process(None, (SCORES, TARGETS))
    assert metric.evaluate(4) == {
        "MulticlassAccuracy/0": 0.5,
        "MulticlassAccuracy/1": 1.0,
        "MulticlassAccuracy/2": 1.0,
        "MulticlassAccuracy/3": 0.0,
    }


def test_collection_keeps_the_names_of_its_metrics():
    collection = torchmetrics.MetricCollection(
        {"acc": _accuracy(), "each": MulticlassAccuracy(4, average=None)}
    )
    metric = TorchMetric(collection)
    metric.process(None, (SCORES, TARGETS))
    assert set(metric.evaluate(4)) == {"acc", "each/0", "each/1", "each/2", "each/3"}


def test_metric_moves_to_the_device_of_the_first_batch():
    metric = TorchMetric(_accuracy(validate_args=False))
    moves = []
    metric.metric.to = lambda device: moves.append(str(device))
    batch = [torch.zeros(2, 4, device="meta"), torch.zeros(2, dtype=torch.long, device="meta")]
    metric.metric.update = lambda preds, targets: None
    metric.process(None, tuple(batch))
    metric.process(None, tuple(batch))
    assert moves == ["meta"]
