"""`ProfilerHook`, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.hooks import ProfilerHook

__all__ = ["ProfilerHook"]
