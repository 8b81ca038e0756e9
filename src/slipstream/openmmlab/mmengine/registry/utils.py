"""`init_default_scope`, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.registry import init_default_scope

__all__ = ["init_default_scope"]
