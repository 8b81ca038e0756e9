"""`EMAHook`, re-exported under MMEngine's module path."""

from slipstream.hooks import EMAHook

__all__ = ["EMAHook"]
