"""Observers that time a trial's training steps or sweep its learning rate, inside the trial's process."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from slipstream.errors import ModelError

# Decay of the exponential moving average of the losses in a learning rate range test.
SMOOTHING = 0.9
# Number of steps after which individual batches hardly affect the average.
SETTLING = 10
# The sweep diverges if the ratio of the smoothed loss to its smallest value exceeds this number.
_DIVERGENCE_RATIO = 4.0


class Finished(BaseException):
    """Raised to end a trial. It derives from `BaseException`, so that `except Exception` does not suppress it."""


class Observer:
    """Base class for objects that are called before and after each training step of a trial."""

    # Returns properties of the run, to report after the warm-up; set by the job.
    describe: Callable[[], Mapping[str, Any]] = dict

    def before_step(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Called with the parameter groups of the optimizer."""

    def after_step(self, loss: Tensor, updated: bool = True) -> None:
        """Called with the loss, a 0-dim tensor on the device, and whether the step updated the weights."""


class Timer(Observer):
    """Report the losses of the first steps, then time steps whenever the parent process requests it.

    Args:
        connection: connection to the parent process, which sends `(steps, untimed)`: the number of steps to time, and
            the number of steps to run before them.
        warmup: number of steps before the first request. Their losses are reported.
    """

    def __init__(self, connection: Connection, warmup: int) -> None:
        self.connection, self._warmup = connection, warmup
        self._losses: list[float] = []
        self._untimed = self._timed = 0
        self._last = time.perf_counter()

    def after_step(self, loss: Tensor, updated: bool = True) -> None:
        """Record the loss of a warm-up step, or report the mean time of the requested steps."""
        if len(self._losses) < self._warmup:
            self._warm_up(loss)
        elif self._untimed:
            self._untimed -= 1
            if self._untimed == 0:
                _synchronize()
                self._last = time.perf_counter()
        else:
            self._done += 1
            if self._done == self._timed:
                _synchronize()
                # A median over individual steps would miss waits for data and, with accumulation, the updates.
                mean = (time.perf_counter() - self._last) / self._timed
                values = {"seconds": mean, "peak_mib": peak_mib(), "loss": float(loss)}
                self.connection.send({"event": "timed", **values})
                self._await_request()

    def _warm_up(self, loss: Tensor) -> None:
        self._losses.append(float(loss))  # waits for the device
        now = time.perf_counter()
        self.connection.send({"event": "step", "seconds": now - self._last})
        self._last = now
        if len(self._losses) == self._warmup:
            properties = {"losses": self._losses, "peak_mib": peak_mib(), **self.describe()}
            self.connection.send({"event": "warm", **properties})
            self._await_request()

    def _await_request(self) -> None:
        try:
            self._timed, self._untimed = self.connection.recv()
        except EOFError:
            raise Finished from None
        self._done = 0
        self._last = time.perf_counter()


class LrSweep(Observer):
    """Increase the learning rate exponentially from step to step, and report the losses.

    With gradient accumulation, a step is an update of the weights, and its loss is the mean over its batches.

    The sweep ends after `steps` steps, at a non-finite loss, or when it diverges: when the smoothed loss exceeds four
    times its smallest value after the first ten steps.

    Args:
        connection: connection to the parent process.
        start, end: first and last learning rate of the group with the largest configured learning rate. The ratios
            between groups do not change.
        steps: number of steps.
    """

    def __init__(self, connection: Connection, start: float, end: float, steps: int) -> None:
        self.connection = connection
        self._rates = [start * (end / start) ** (i / (steps - 1)) for i in range(steps)]
        self._losses: list[float] = []
        self._window: list[float] = []
        self._average, self._best = 0.0, float("inf")
        self._scales: list[float] = []

    def before_step(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Set the learning rates of this step."""
        if not self._scales:
            rates = [float(group["lr"]) for group in param_groups]
            largest = max(rates)
            self._scales = [rate / largest if largest > 0 else 1.0 for rate in rates]
        rate = self._rates[len(self._losses)]
        for group, scale in zip(param_groups, self._scales, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * scale)
            else:
                group["lr"] = rate * scale

    def after_step(self, loss: Tensor, updated: bool = True) -> None:
        """Record the loss, and end the sweep if it is complete or diverges."""
        self._window.append(float(loss))
        value = fmean(self._window)
        if math.isfinite(value) and not updated:
            return
        self._losses.append(value)
        self._window.clear()
        self.connection.send({"event": "step", "seconds": 0.0})
        if not math.isfinite(value) or self._diverges(value) or len(self._losses) == len(self._rates):
            rates = self._rates[: len(self._losses)]
            self.connection.send({"event": "sweep", "rates": rates, "losses": self._losses})
            raise Finished

    def _diverges(self, loss: float) -> bool:
        # The losses of individual batches are too noisy to compare.
        steps = len(self._losses)
        self._average = SMOOTHING * self._average + (1 - SMOOTHING) * loss
        smoothed = self._average / (1 - SMOOTHING**steps)
        if steps <= SETTLING:
            return False
        self._best = min(self._best, smoothed)
        return smoothed > self._best + (_DIVERGENCE_RATIO - 1) * abs(self._best)


def total_loss(logs: Mapping[str, Any]) -> Tensor:
    """Return the loss that a training step minimizes, from the dict that the step returns.

    Raises:
        ModelError: no entry is a loss, so a trial cannot be compared with the baseline.
    """
    if "loss" in logs:
        return torch.as_tensor(logs["loss"])
    losses = [torch.as_tensor(value) for name, value in logs.items() if "loss" in name]
    if not losses:
        raise ModelError(f"the training step returns no entry with 'loss' in its name: {sorted(logs)}")
    return torch.stack([loss.detach().sum() for loss in losses]).sum()


def shapes_of(batch: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the tensors in a batch."""
    return tuple(tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def peak_mib() -> float:
    """Return the peak memory in MiB of torch's CUDA allocator or, without CUDA, of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
