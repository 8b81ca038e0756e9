"""`RuntimeInfoHook`, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.hooks import RuntimeInfoHook

__all__ = ["RuntimeInfoHook"]
