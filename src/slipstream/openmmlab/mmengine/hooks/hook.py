"""`Hook`, re-exported under MMEngine's module path."""

from slipstream.hooks import Hook

__all__ = ["Hook"]
