"""The evaluator."""

from slipstream.evaluator import Evaluator

__all__ = ["Evaluator"]
