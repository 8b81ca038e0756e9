"""`Hook`."""

from slipstream.hooks import Hook

__all__ = ["Hook"]
