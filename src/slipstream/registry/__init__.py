"""Registries of classes and functions, and functions that build objects from configuration dicts."""

from slipstream.registry import root
from slipstream.registry.registry import Registry, build_from_cfg, default_scope, init_default_scope
from slipstream.registry.root import *  # noqa: F403

__all__ = ["Registry", "build_from_cfg", "default_scope", "init_default_scope"]
__all__ += root.__all__
