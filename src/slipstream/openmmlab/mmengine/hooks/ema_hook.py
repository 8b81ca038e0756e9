"""`EMAHook`."""

from slipstream.hooks import EMAHook

__all__ = ["EMAHook"]
