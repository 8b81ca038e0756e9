"""Parts of the Runner, at MMEngine's module path."""

from slipstream.openmmlab.mmengine.runner import BaseLoop

__all__ = ["BaseLoop"]
