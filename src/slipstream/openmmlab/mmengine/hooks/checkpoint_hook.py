"""`CheckpointHook`."""

from slipstream.hooks import CheckpointHook

__all__ = ["CheckpointHook"]
