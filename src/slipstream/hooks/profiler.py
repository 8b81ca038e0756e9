"""Profile a few steps with the torch profiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import profile, schedule, tensorboard_trace_handler

from slipstream.dist import is_main_process
from slipstream.hooks.hook import Hook
from slipstream.registry import HOOKS
from slipstream.typecheck import NonNegativeInt, PositiveInt, check

if TYPE_CHECKING:
    from slipstream.runner import Runner


@HOOKS.register_module()
class ProfilerHook(Hook):
    """On rank 0, write a trace of a few steps to `work_dir/profile`, for TensorBoard or chrome://tracing.

    Args:
        profile_times: number of steps to record.
        wait, warmup: number of initial steps to skip, and number of subsequent steps to profile without recording.
        record_shapes, profile_memory, with_stack, with_flops: as in `torch.profiler.profile`.
    """

    priority = "VERY_LOW"

    def __init__(
        self,
        profile_times: PositiveInt = 1,
        wait: NonNegativeInt = 1,
        warmup: NonNegativeInt = 1,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
    ) -> None:
        check(profile_times, PositiveInt, "profile_times")
        check(wait, NonNegativeInt, "wait")
        check(warmup, NonNegativeInt, "warmup")
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
            # Without `activities`, the profiler records all activities that the device supports.
            self._profiler = profile(
                schedule=self._schedule, on_trace_ready=self._trace_handler(runner), **self._options
            )
            self._profiler.start()

    def _trace_handler(self, runner: Runner) -> Callable[[profile], None]:
        """Return the function that is called with the profiler after the recorded steps."""
        return tensorboard_trace_handler(str(Path(runner.work_dir) / "profile"))

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Advance the profiler's schedule."""
        if self._profiler is not None:
            self._profiler.step()

    def after_train(self, runner: Runner) -> None:
        """Stop the profiler."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
