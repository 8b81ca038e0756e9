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
    "ProfilerHook",
    "RuntimeInfoHook",
    "SyncBuffersHook",
]
