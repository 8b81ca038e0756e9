"""`ZeroRedundancyOptimizer`, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.optim import ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancyOptimizer"]
