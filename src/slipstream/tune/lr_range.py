"""Learning rate range test: record the loss while the learning rate increases.

Smith, "Cyclical Learning Rates for Training Neural Networks", WACV 2017 (arXiv:1506.01186).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

from slipstream.errors import ConfigError, SlipstreamError
from slipstream.extras import extra
from slipstream.files import atomic_write
from slipstream.tune.jobs import Setting
from slipstream.tune.observer import SETTLING, SMOOTHING, LrSweep
from slipstream.tune.process import Job, Process, TrialError, format_seconds

_MIN_STEPS = 10
# Number of steps before and after a step that are used to compute the slope of the smoothed loss.
_SPAN = 8
# Minimum relative decrease of the smoothed loss for which a learning rate is suggested.
_MIN_DECREASE = 1e-3
# Minimum decrease in standard deviations of a single loss. Without any trend, 1 % of the curves fall by more.
_MIN_FALL = 1.15


@dataclass(frozen=True)
class LrRange:
    """The losses of a learning rate range test."""

    rates: list[float]
    """The learning rate of each step."""
    losses: list[float]
    """The loss of each step, computed before the update. The last loss may not be finite."""

    @property
    def smoothed(self) -> list[float]:
        """The losses up to the smallest average, as an exponential moving average with bias correction.

        The average is computed forward and then backward, because an average in only one direction is delayed by about
        1 / (1 - decay) steps, which would increase the suggested learning rate.
        """
        average = _average(list(takewhile(math.isfinite, self.losses)))
        settled = average[SETTLING:] or average[-1:]
        count = average.index(min(settled)) + 1 if settled else 0
        return _average(average[count - 1 :: -1])[::-1] if count else []

    @property
    def suggestion(self) -> float | None:
        """The learning rate at which the smoothed loss falls fastest with respect to the log of the learning rate.

        None if the smoothed loss falls by at most 0.1%, or by no more than the noise of the losses could explain, or if
        there are fewer than 10 losses before divergence.
        """
        losses = self.smoothed
        first, last = min(SETTLING, len(losses) // 4), len(losses) - 1
        if len(losses) < _MIN_STEPS:
            return None
        noise = math.sqrt(fmean((b - a) ** 2 for a, b in pairwise(self.losses[: last + 1])) / 2)
        if losses[first] - losses[last] <= max(_MIN_DECREASE * abs(losses[first]), _MIN_FALL * noise):
            return None
        # The rates increase by a constant factor, so slopes over the steps are proportional to the derivative with
        # respect to the logarithm of the rate. Differences between adjacent steps are too noisy for small batches.
        slopes = {}
        for step in range(first, last + 1):
            low, high = max(step - _SPAN, 0), min(step + _SPAN, last)
            slopes[step] = (losses[high] - losses[low]) / (high - low)
        return self.rates[min(slopes, key=lambda step: slopes[step])]

    def __str__(self) -> str:
        if (suggestion := self.suggestion) is not None:
            text = f"Suggested learning rate: {suggestion:.2g}"
        elif len(self.losses) <= _MIN_STEPS:
            text = f"The loss diverged within {_MIN_STEPS} steps; start at a lower learning rate"
        else:
            text = "The loss did not fall by more than its noise; use larger batches or more steps, or check the data"
        return f"{text} ({len(self.rates)} steps from {self.rates[0]:.2g} to {self.rates[-1]:.2g})."

    def plot(self, path: str | Path) -> Path:
        """Atomically write a PNG plot of the losses against the learning rate.

        Raises:
            MissingPackageError: matplotlib is not installed.
        """
        with extra("plots"):
            from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes: Any = figure.add_subplot()
        smoothed = self.smoothed
        axes.plot(self.rates, self.losses, alpha=0.4, label="loss")
        axes.plot(self.rates[: len(smoothed)], smoothed, label="smoothed loss")
        if (suggestion := self.suggestion) is not None:
            axes.axvline(suggestion, linestyle="--", color="gray", label=f"suggestion: {suggestion:.2g}")
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
        axes.legend()
        with atomic_write(path := Path(path)) as temporary:
            figure.savefig(temporary, format="png", dpi=120)
        return path


def _average(losses: Sequence[float]) -> list[float]:
    """Return the exponential moving average of the losses, with bias correction."""
    average, averages = 0.0, []
    for step, loss in enumerate(losses, start=1):
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        averages.append(average / (1 - SMOOTHING**step))
    return averages


def sweep_lr(
    make_job: Callable[[Setting], Job],
    start: float,
    end: float,
    steps: int,
    budget: float,
    start_time: float | None = None,
) -> LrRange:
    """Run the range test in a separate process, so the model, the optimizer and all random states remain unchanged.

    Args:
        make_job: a function that returns the run for a setting.
        start, end, steps: see `find_lr`.
        budget: time limit in seconds.
        start_time: the time at which the budget starts, as returned by `time.monotonic()`; None means now.

    Raises:
        ConfigError: an argument is out of range, or the test does not finish within the budget.
        SlipstreamError: the run fails.
    """
    deadline = (time.monotonic() if start_time is None else start_time) + budget
    if not 0 < start < end < math.inf or steps < _MIN_STEPS:
        raise ConfigError(f"requires 0 < start < end and at least {_MIN_STEPS} steps", "find_lr")
    make_observer = partial(LrSweep, start=start, end=end, steps=steps)
    try:
        with Process(make_job(Setting(constant_lr=True)), make_observer) as process:
            sweep = process.wait_for("sweep", max(deadline - time.monotonic(), 0.0))
    except TrialError as failure:
        text = f"the learning rate range test did not finish ({failure.status}): {failure.reason}"
        if failure.status == "timed out":
            raise ConfigError(f"{format_seconds(budget)} is too short: {text}", "budget") from None
        raise SlipstreamError(text) from None
    return LrRange(sweep["rates"], sweep["losses"])
