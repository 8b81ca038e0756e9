"""`DefaultOptimWrapperConstructor`, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.optim import DefaultOptimWrapperConstructor

__all__ = ["DefaultOptimWrapperConstructor"]
