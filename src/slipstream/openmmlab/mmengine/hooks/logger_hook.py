"""`LoggerHook`, re-exported under MMEngine's module path."""

from slipstream.hooks import LoggerHook

__all__ = ["LoggerHook"]
