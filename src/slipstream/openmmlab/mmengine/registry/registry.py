"""`Registry`, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.registry import Registry

__all__ = ["Registry"]
