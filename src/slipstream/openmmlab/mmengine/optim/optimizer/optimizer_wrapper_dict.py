"""`OptimWrapperDict`, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.optim import OptimWrapperDict

__all__ = ["OptimWrapperDict"]
