"""Optimizer wrappers, at MMEngine's module path."""

from slipstream.openmmlab.mmengine.optim import ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancyOptimizer"]
