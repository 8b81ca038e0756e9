"""`AmpOptimWrapper`, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.optim import AmpOptimWrapper

__all__ = ["AmpOptimWrapper"]
