"""The hook that times training steps for `slipstream bench`."""

from __future__ import annotations

import resource
import sys
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from slipstream.cli.profiling import Finished
from slipstream.hooks import Hook
from slipstream.step import CompiledStep
from slipstream.tune.observer import total_loss

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["StepTimer"]


class StepTimer(Hook):
    """Times each step from the end of the previous step, and ends training after the last step.

    The host waits for the device after each step.

    Args:
        warmup: number of untimed steps at the start.
        steps: number of steps to time.
        device: the device of the model.
    """

    priority = "LOWEST"

    def __init__(self, warmup: int, steps: int, device: torch.device) -> None:
        self.seconds: list[float] = []
        """Duration of each timed step."""
        self.samples = 0
        """Number of samples in all timed steps. The last batch of an epoch may be smaller."""
        self.done = 0
        """Number of finished steps."""
        self.finite = self.used_graph = True
        """`finite`: whether the losses of all timed steps are finite.

        `used_graph`: whether all timed steps ran as one graph.
        """
        self._warmup, self._steps, self._device = warmup, steps, device
        self._last = 0.0

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Store the duration of the step.

        Raises:
            Finished: this was the last step.
            ModelError: the step returns no loss.
        """
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        now = perf_counter()
        if self.done >= self._warmup:
            self.seconds.append(now - self._last)
            self.samples += runner.train_loop.step_samples
            self.used_graph &= isinstance(runner.step, CompiledStep) and runner.step.has_graph
            self.finite &= bool(torch.isfinite(total_loss(outputs or {})).all())
        self.done += 1
        if self.done == self._warmup + self._steps:
            raise Finished
        if self.done == self._warmup and self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._last = perf_counter()

    def memory(self) -> int:
        """Return the peak memory in bytes.

        On CUDA, this is the memory allocated on the device during the timed steps. On other devices, it is the memory
        of the process.
        """
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, Linux KiB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
