"""`EarlyStoppingHook`, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.hooks import EarlyStoppingHook

__all__ = ["EarlyStoppingHook"]
