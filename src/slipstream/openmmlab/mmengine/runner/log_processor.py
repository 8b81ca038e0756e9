"""Parts of the Runner, at MMEngine's module path."""

from slipstream.openmmlab.mmengine.runner import LogProcessor

__all__ = ["LogProcessor"]
