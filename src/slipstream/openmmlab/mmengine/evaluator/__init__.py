"""The evaluator and metrics."""

from slipstream.evaluator import Evaluator
from slipstream.openmmlab.mmengine.evaluator.metric import BaseMetric, DumpResults
from slipstream.openmmlab.mmengine.evaluator.utils import get_metric_value

__all__ = ["BaseMetric", "DumpResults", "Evaluator", "get_metric_value"]
