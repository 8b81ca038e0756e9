"""Hooks that run before and after runs, epochs and iterations."""

from slipstream.hooks.average_best import AverageBestHook
from slipstream.hooks.checkpoint import CheckpointHook
from slipstream.hooks.class_count import ClassCountHook
from slipstream.hooks.ema import EMAHook
from slipstream.hooks.gc import GcHook
from slipstream.hooks.hook import Hook, HookList, Priority, get_priority
from slipstream.hooks.logging_hooks import LoggerHook, ProgressBarHook
from slipstream.hooks.loss_spike import LossSpikeHook
from slipstream.hooks.nan_guard import NanGuardHook
from slipstream.hooks.notebook import NotebookHook, in_notebook
from slipstream.hooks.pictures import SegVisualizationHook
from slipstream.hooks.precise_bn import PreciseBNHook
from slipstream.hooks.preemption import PreemptionHook
from slipstream.hooks.profiler import ProfilerHook
from slipstream.hooks.report import ReportHook
from slipstream.hooks.runtime_info import RuntimeInfoHook
from slipstream.hooks.schedule import (
    EarlyStoppingHook,
    EmptyCacheHook,
    MonitorCheckHook,
    ParamSchedulerHook,
    SyncBuffersHook,
)
from slipstream.hooks.timing import DistSamplerSeedHook, IterTimerHook

__all__ = [
    "AverageBestHook", "CheckpointHook", "ClassCountHook", "DistSamplerSeedHook", "EMAHook",
    "EarlyStoppingHook", "EmptyCacheHook", "GcHook", "Hook", "HookList", "IterTimerHook", "LoggerHook",
    "LossSpikeHook", "MonitorCheckHook", "NanGuardHook", "NotebookHook", "ParamSchedulerHook",
    "PreciseBNHook", "PreemptionHook", "Priority", "ProfilerHook", "ProgressBarHook", "ReportHook",
    "RuntimeInfoHook", "SegVisualizationHook", "SyncBuffersHook", "get_priority", "in_notebook",
]  # fmt: skip
