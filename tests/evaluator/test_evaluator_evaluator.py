from __future__ import annotations

import pytest
import torch

from slipstream.errors import ConfigError, DataError
from slipstream.evaluator import Accuracy, BaseMetric, Evaluator, TorchMetric

torchmetrics = pytest.importorskip("torchmetrics")

SCORES = torch.eye(4)
TARGETS = torch.tensor([0, 1, 2, 0])


class Seen(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results.append((data_batch, data_samples))

    def compute_metrics(self, results):
        self.seen = results
        return {"calls": len(results)}


def test_values_of_several_metrics_are_merged():
    evaluator = Evaluator(
        [
            {"type": "Accuracy", "topk": (1, 2)},
            torchmetrics.classification.MulticlassAccuracy(4, average="micro"),
            {"type": "MulticlassAccuracy", "num_classes": 4, "average": None},
            Seen(),
        ]
    )
    evaluator.process((SCORES, TARGETS))
    top_2 = (SCORES.topk(2).indices == TARGETS[:, None]).any(1)
    assert evaluator.evaluate(4) == {
        "accuracy/top1": 75.0,
        "accuracy/top2": pytest.approx(100 * top_2.double().mean().item()),
        "MulticlassAccuracy": 0.75,
        "MulticlassAccuracy/0": 0.5,
        "MulticlassAccuracy/1": 1.0,
        "MulticlassAccuracy/2": 1.0,
        "MulticlassAccuracy/3": 0.0,
        "calls": 1,
    }


@pytest.mark.parametrize(
    "metrics", [Accuracy(), {"type": "Accuracy"}, [{"type": "Accuracy"}], ({"type": Accuracy},)]
)
def test_one_metric_or_several_are_accepted(metrics):
    assert isinstance(Evaluator(metrics).metrics[0], Accuracy)


def test_torchmetrics_objects_are_wrapped():
    metric = torchmetrics.classification.MulticlassAccuracy(4)
    collection = torchmetrics.MetricCollection([metric])
    assert [type(m) for m in Evaluator([metric, collection]).metrics] == [TorchMetric, TorchMetric]


def test_duplicate_metric_names_raise_an_error():
    evaluator = Evaluator([Accuracy(), Accuracy()])
    evaluator.process((SCORES, TARGETS))
    with pytest.raises(ConfigError, match=r"'accuracy/top1' \(one of them is Accuracy\).*prefix"):
        evaluator.evaluate(4)
    evaluator = Evaluator([Accuracy(), Accuracy(prefix="second")])
    evaluator.process((SCORES, TARGETS))
    assert set(evaluator.evaluate(4)) == {"accuracy/top1", "second/top1"}


@pytest.mark.parametrize("chunk_size", [1, 3, 10])
@pytest.mark.parametrize("form", ["dict", "pair", "ids"])
def test_offline_evaluation_does_not_depend_on_chunk_size(chunk_size, form):
    scores = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.randint(0, 5, (7,), generator=torch.Generator().manual_seed(1))
    samples = list(zip(scores if form != "ids" else scores.argmax(1).tolist(), targets, strict=True))
    if form == "dict":
        samples = [{"preds": p, "targets": t} for p, t in samples]
    live = Evaluator(Accuracy())
    live.process((scores, targets))
    assert Evaluator(Accuracy()).offline_evaluate(samples, chunk_size=chunk_size) == live.evaluate(7)


def test_offline_evaluation_passes_matching_chunks_of_data():
    evaluator = Evaluator(Seen())
    assert evaluator.offline_evaluate([1, 2, 3], ["a", "b", "c"], chunk_size=2) == {"calls": 2}
    assert evaluator.metrics[0].seen == [(["a", "b"], [1, 2]), (["c"], [3])]


def test_offline_evaluation_requires_equal_lengths():
    with pytest.raises(DataError, match="data_samples has length 3, but data has length 2"):
        Evaluator(Seen()).offline_evaluate([1, 2, 3], ["a", "b"])
