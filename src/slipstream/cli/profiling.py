"""The hook that times and records steps for `slipstream profile`, and a counter of synchronizations."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from slipstream.hooks import ProfilerHook

if TYPE_CHECKING:
    from torch.profiler import profile

    from slipstream.runner import Runner

__all__ = ["Finished", "StepProfiler", "Synchronizations", "source_line"]

_PACKAGE, _TORCH = Path(__file__).parents[1], Path(torch.__file__).parent


class Finished(Exception):  # noqa: N818 (not an error)
    """Raised to end training after the last measured step."""


class Synchronizations:
    """Counts the calls that make the host wait for the device, by source line.

    Devices without `set_sync_debug_mode` do not report these calls. On the CPU, there are no such calls, because CPU
    operations are synchronous.
    """

    def __init__(self, device: torch.device) -> None:
        self.lines: Counter[str] = Counter()
        """Number of synchronizations for each source line, keyed by `file:line: code`."""
        module = None if device.type == "cpu" else torch.get_device_module(device)
        self._set_mode: Callable[[str], None] | None = getattr(module, "set_sync_debug_mode", None)
        self._device = device

    @property
    def problem(self) -> str | None:
        """The reason why synchronizations cannot be counted, or None if they can."""
        if self._device.type == "cpu":
            return "none, because CPU operations are synchronous"
        if self._set_mode is None:
            return f"not reported, because torch.{self._device.type} has no set_sync_debug_mode"
        return None

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the synchronizations in the `with` block."""
        if self._set_mode is None:
            yield
            return
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            show = warnings.showwarning

            def count(message: Warning | str, *args: Any, **kwargs: Any) -> None:
                if "called a synchronizing" in str(message):
                    self.lines[source_line()] += 1
                else:
                    show(message, *args, **kwargs)

            warnings.showwarning = count
            self._set_mode("warn")
            try:
                yield
            finally:
                self._set_mode("default")


def source_line() -> str:
    """Return the line of the innermost call in user code or, if there is none, in this package."""
    stack = [f for f in traceback.extract_stack() if f.filename not in (__file__, warnings.__file__)]
    stack = [f for f in stack if not Path(f.filename).is_relative_to(_TORCH)]
    in_package = [Path(f.filename).is_relative_to(_PACKAGE) for f in stack]
    called = stack[in_package.index(True) :] if any(in_package) else stack
    user_frames = [f for f in called if not Path(f.filename).is_relative_to(_PACKAGE)]
    for frame in reversed(user_frames or called):
        return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return "unknown line: no Python code is on the stack"


class StepProfiler(ProfilerHook):
    """Times steps without the profiler, then records steps with the profiler, and ends training.

    Args:
        warmup: number of untimed steps at the start.
        steps: number of steps to time; the same number of steps is then recorded.
        stacks: whether to record Python stacks.
        device: the device of the model.
    """

    priority = "LOWEST"
    reads_phases = True

    def __init__(self, warmup: int, steps: int, stacks: bool, device: torch.device) -> None:
        super().__init__(
            profile_times=steps,
            wait=warmup + steps,
            warmup=1,
            record_shapes=True,
            profile_memory=True,
            with_stack=stacks,
        )
        self.needed = warmup + 2 * steps + 1
        """Total number of steps: warm-up, timed and recorded steps, and one step to start the profiler."""
        self.done = 0
        """Number of finished steps."""
        self.seconds = 0.0
        """Total duration of the timed steps, including the time spent waiting for batches."""
        self.wait_seconds = 0.0
        """The part of `seconds` that the host spent waiting for batches."""
        self.samples = 0
        """Number of samples in the timed steps, summed over all processes."""
        self.profile: profile | None = None
        self.synchronizations = Synchronizations(device)
        self._timed = range(warmup, warmup + steps)
        self._device = device
        self._start = self._waited = 0.0
        self._counting = ExitStack()

    def _trace_handler(self, runner: Runner) -> Callable[[profile], None]:
        def keep(recorded: profile) -> None:
            if self.done == self.needed:  # otherwise training ended early, and too few steps were recorded
                self.profile = recorded

        return keep

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Start and stop timing and recording.

        Raises:
            Finished: the last step was recorded.
        """
        if self.done in self._timed:
            self.samples += runner.train_loop.step_samples
        self.done += 1
        if self.done == self._timed.stop:
            self._wait_for_device()
            self.seconds = perf_counter() - self._start
            self.wait_seconds = runner.phases.total("data") - self._waited
        if self.done == self.needed:
            self.release(runner)
        super().after_train_iter(runner, batch_idx, data_batch, outputs)  # advances the profiler
        if self.done == self.needed:
            raise Finished
        if self.done == self._timed.stop + 1:  # the profiler has warmed up
            self._counting.enter_context(self.synchronizations.counting())
        if self.done == self._timed.start:
            self._wait_for_device()
            self._start, self._waited = perf_counter(), runner.phases.total("data")

    def _wait_for_device(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def release(self, runner: Runner) -> None:
        """Stop counting synchronizations."""
        self._counting.close()
