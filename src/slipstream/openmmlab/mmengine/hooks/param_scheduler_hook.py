"""`ParamSchedulerHook`, re-exported under MMEngine's module path."""

from slipstream.openmmlab.mmengine.hooks import ParamSchedulerHook

__all__ = ["ParamSchedulerHook"]
