"""`EmptyCacheHook`, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.hooks import EmptyCacheHook

__all__ = ["EmptyCacheHook"]
