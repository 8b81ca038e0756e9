"""`OptimWrapper`, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.optim import OptimWrapper

__all__ = ["OptimWrapper"]
