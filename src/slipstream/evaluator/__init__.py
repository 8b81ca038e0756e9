"""The evaluator, metrics that accumulate counts on the device, and an adapter for torchmetrics."""

from slipstream.evaluator.classification import Accuracy
from slipstream.evaluator.dump import DumpResults
from slipstream.evaluator.evaluator import Evaluator, TorchMetric
from slipstream.evaluator.metric import BaseMetric, CountingMetric
from slipstream.evaluator.segmentation import IoUMetric

__all__ = ["Accuracy", "BaseMetric", "CountingMetric", "DumpResults", "Evaluator", "IoUMetric", "TorchMetric"]
