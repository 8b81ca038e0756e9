"""Base classes of metrics."""

from slipstream.evaluator import BaseMetric, DumpResults
from slipstream.evaluator.metric import _to_cpu

__all__ = ["BaseMetric", "DumpResults", "_to_cpu"]
