"""What happens around steps."""

from slipstream.hooks.checkpoint import CheckpointHook
from slipstream.hooks.ema import EMAHook
from slipstream.hooks.hook import Hook, Priority, get_priority
from slipstream.hooks.hook_list import HookList
from slipstream.hooks.logging_hooks import LoggerHook, ProgressBarHook
from slipstream.hooks.pictures import SegVisualizationHook
from slipstream.hooks.profiler import ProfilerHook
from slipstream.hooks.runtime_info import RuntimeInfoHook
from slipstream.hooks.schedule import EarlyStoppingHook, EmptyCacheHook, ParamSchedulerHook, SyncBuffersHook
from slipstream.hooks.timing import DistSamplerSeedHook, IterTimerHook

__all__ = [
    "CheckpointHook",
    "DistSamplerSeedHook",
    "EMAHook",
    "EarlyStoppingHook",
    "EmptyCacheHook",
    "Hook",
    "HookList",
    "IterTimerHook",
    "LoggerHook",
    "ParamSchedulerHook",
    "Priority",
    "ProfilerHook",
    "ProgressBarHook",
    "RuntimeInfoHook",
    "SegVisualizationHook",
    "SyncBuffersHook",
    "get_priority",
]
