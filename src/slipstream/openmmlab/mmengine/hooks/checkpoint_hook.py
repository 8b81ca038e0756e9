"""`CheckpointHook`, re-exported under MMEngine's module path."""

from slipstream.hooks import CheckpointHook

__all__ = ["CheckpointHook"]
