"""`LoggerHook`."""

from slipstream.hooks import LoggerHook

__all__ = ["LoggerHook"]
