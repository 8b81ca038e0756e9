from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from slipstream.errors import DistributedError
from slipstream.evaluator import BaseMetric
from slipstream.evaluator import metric as metric_module


class TutorialAccuracy(BaseMetric):
    """The metric from MMEngine's tutorial "15 minutes to get started"."""

    def process(self, data_batch, data_samples):
        score, gt = data_samples
        self.results.append({"batch_size": len(gt), "correct": (score.argmax(dim=1) == gt).sum()})

    def compute_metrics(self, results):
        total_correct = sum(item["correct"] for item in results)
        total_size = sum(item["batch_size"] for item in results)
        return {"accuracy": 100 * total_correct / total_size}


class Keep(BaseMetric):
    default_prefix = "kept"

    def process(self, data_batch, data_samples):
        self.results.extend(data_samples)

    def compute_metrics(self, results):
        self.seen = list(results)
        return {"sum": sum(results), "count": np.int64(len(results))}


def test_tutorial_metric_returns_a_float():
    metric = TutorialAccuracy()
    scores = torch.eye(4)[[0, 1, 2, 3]]
    metric.process(None, (scores, torch.tensor([0, 1, 2, 0])))
    metric.process(None, (scores[:2], torch.tensor([1, 0])))
    value = metric.evaluate(6)
    assert value == {"accuracy": pytest.approx(50.0)}
    assert type(value["accuracy"]) is float


def test_results_beyond_the_dataset_size_are_dropped():
    metric = Keep()
    metric.process(None, [1, 2, 3, 1])
    assert metric.evaluate(3) == {"kept/sum": 6, "kept/count": 3}


def test_evaluate_clears_the_results():
    metric = Keep()
    metric.process(None, [1, 2])
    metric.evaluate(2)
    assert metric.results == []
    metric.process(None, [5])
    assert metric.evaluate(1)["kept/sum"] == 5


def test_compute_metrics_receives_cpu_tensors_without_gradients():
    metric = Keep()
    value = torch.ones((), requires_grad=True) * 2
    metric.process(None, [value])
    metric.evaluate(1)
    assert metric.seen[0].device.type == "cpu"
    assert not metric.seen[0].requires_grad


def test_rank_0_raises_its_error_after_the_broadcast(monkeypatch):
    sent = []
    monkeypatch.setattr(metric_module, "broadcast_object_list", lambda data: sent.append(list(data)))
    metric = Keep()
    metric.compute_metrics = lambda results: 1 / 0
    metric.process(None, [1])
    with pytest.raises(ZeroDivisionError):
        metric.evaluate(1)
    assert sent == [["ZeroDivisionError: division by zero"]]


def _as_rank_1(monkeypatch, answer):
    monkeypatch.setattr(metric_module, "collect_results", lambda *args: None)
    monkeypatch.setattr(metric_module, "is_main_process", lambda: False)
    monkeypatch.setattr(metric_module, "broadcast_object_list", lambda data: data.__setitem__(0, answer))


def test_other_ranks_return_the_result_of_rank_0(monkeypatch):
    _as_rank_1(monkeypatch, {"kept/sum": 7})
    metric = Keep()
    metric.process(None, [1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert metric.evaluate(1) == {"kept/sum": 7}
    assert metric.results == []


def test_other_ranks_fail_with_the_error_of_rank_0(monkeypatch):
    _as_rank_1(monkeypatch, "ZeroDivisionError: division by zero")
    with pytest.raises(DistributedError, match=r"Keep\.compute_metrics failed on rank 0: ZeroDivisionError"):
        Keep().evaluate(1)
