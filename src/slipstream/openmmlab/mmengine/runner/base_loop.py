"""`BaseLoop`, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.runner import BaseLoop

__all__ = ["BaseLoop"]
