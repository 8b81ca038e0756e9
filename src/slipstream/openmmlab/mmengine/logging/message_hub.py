"""`MessageHub`, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.logging import MessageHub

__all__ = ["MessageHub"]
