"""`IterTimerHook`, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.hooks import IterTimerHook

__all__ = ["IterTimerHook"]
