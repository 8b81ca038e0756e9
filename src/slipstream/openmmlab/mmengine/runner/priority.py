"""`Priority` and `get_priority`, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.runner import Priority, get_priority

__all__ = ["Priority", "get_priority"]
