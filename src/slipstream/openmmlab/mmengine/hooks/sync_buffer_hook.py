"""`SyncBuffersHook`, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.hooks import SyncBuffersHook

__all__ = ["SyncBuffersHook"]
