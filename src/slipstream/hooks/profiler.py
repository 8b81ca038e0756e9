"""Profile a few steps with torch's profiler."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import profile, schedule, tensorboard_trace_handler

from slipstream.dist import is_main_process
from slipstream.errors import ConfigError
from slipstream.hooks.hook import Hook
from slipstream.registry import HOOKS

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["ProfilerHook"]


@HOOKS.register_module()
class ProfilerHook(Hook):
    """Write a trace of some steps for TensorBoard or chrome://tracing into `work_dir/profile`, on rank 0.

    Args:
        profile_times: how many steps are recorded.
        wait, warmup: steps left out, and steps run under the profiler without being recorded.
        record_shapes, profile_memory, with_stack, with_flops: as in `torch.profiler.profile`.
    """

    priority = "VERY_LOW"

    def __init__(
        self,
        profile_times: int = 1,
        wait: int = 1,
        warmup: int = 1,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
    ) -> None:
        if profile_times < 1:
            raise ConfigError(f"must be at least 1, not {profile_times}", "profile_times")
        for name, value in {"wait": wait, "warmup": warmup}.items():
            if value < 0:
                raise ConfigError(f"must not be negative, not {value}", name)
        self._schedule = schedule(wait=wait, warmup=warmup, active=profile_times, repeat=1)
        self._options: dict[str, Any] = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
            "with_flops": with_flops,
        }
        self._profiler: profile | None = None

    def before_train(self, runner: Runner) -> None:
        """Start the profiler."""
        if is_main_process():
            folder = str(Path(runner.work_dir) / "profile")
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = profile(
                activities=activities,
                schedule=self._schedule,
                on_trace_ready=tensorboard_trace_handler(folder),
                **self._options,
            )
            self._profiler.start()

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Move the profiler's schedule on."""
        if self._profiler is not None:
            self._profiler.step()

    def after_train(self, runner: Runner) -> None:
        """Write what was recorded."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
