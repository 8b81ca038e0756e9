"""`LogProcessor`, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.runner import LogProcessor

__all__ = ["LogProcessor"]
