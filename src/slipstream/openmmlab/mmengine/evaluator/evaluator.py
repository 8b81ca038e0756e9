"""`Evaluator`, re-exported under MMEngine's module path."""

from slipstream.evaluator import Evaluator

__all__ = ["Evaluator"]
