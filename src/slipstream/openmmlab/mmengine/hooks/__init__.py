"""Hooks."""

from slipstream.hooks import (
    CheckpointHook,
    DistSamplerSeedHook,
    EarlyStoppingHook,
    EMAHook,
    EmptyCacheHook,
    Hook,
    IterTimerHook,
    LoggerHook,
    ParamSchedulerHook,
    ProfilerHook,
    RuntimeInfoHook,
    SyncBuffersHook,
)
from slipstream.openmmlab.mmengine.hooks.test_time_aug_hook import PrepareTTAHook

__all__ = [
    "CheckpointHook",
    "DistSamplerSeedHook",
    "EMAHook",
    "EarlyStoppingHook",
    "EmptyCacheHook",
    "Hook",
    "IterTimerHook",
    "LoggerHook",
    "ParamSchedulerHook",
    "PrepareTTAHook",
    "ProfilerHook",
    "RuntimeInfoHook",
    "SyncBuffersHook",
]
