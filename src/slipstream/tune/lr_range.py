"""Learning rate range test: record the loss while the learning rate increases.

Smith, "Cyclical Learning Rates for Training Neural Networks", WACV 2017 (arXiv:1506.01186).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from slipstream.errors import ConfigError, SlipstreamError
from slipstream.extras import extra
from slipstream.files import atomic_write
from slipstream.tune.jobs import Setting
from slipstream.tune.observer import SETTLING, SMOOTHING, LrSweep, divergence_limit
from slipstream.tune.process import Job, Process, TrialError, budget_error

__all__ = ["LrRange", "sweep_lr"]

_MIN_STEPS = 10
_SPAN = 8
"""Number of steps before and after a step that are used to estimate the slope of the smoothed loss."""
_MIN_DECREASE = 1e-3
"""Minimum relative decrease of the smoothed loss for which a learning rate is suggested."""


@dataclass(frozen=True)
class LrRange:
    """The losses of a learning rate range test."""

    rates: list[float]
    """The learning rate of each step."""
    losses: list[float]
    """The loss of each step, computed before the update. The last loss may not be finite."""

    @property
    def smoothed(self) -> list[float]:
        """The losses before divergence, as an exponential moving average with bias correction.

        The average is computed forward and then backward, because an average in only one direction is delayed by about
        1 / (1 - decay) steps, which would increase the suggested learning rate. The losses after divergence are
        omitted, because the backward average would spread them over the preceding steps.
        """
        return _average(_average(_before_divergence(self.losses))[::-1])[::-1]

    @property
    def suggestion(self) -> float | None:
        """The learning rate at which the smoothed loss falls fastest with respect to the log of the learning rate.

        None if the smoothed loss falls by at most 0.1%, or if there are fewer than 10 losses before divergence.
        """
        losses = self.smoothed
        first = min(SETTLING, len(losses) // 4)
        if len(losses) < _MIN_STEPS or losses[first] - min(losses) <= _MIN_DECREASE * abs(losses[first]):
            return None
        lowest = losses.index(min(losses[first:]))
        # The rates increase by a constant factor, so slopes over the steps are proportional to the derivative with
        # respect to the logarithm of the rate. Differences between adjacent steps are too noisy for small batches.
        slopes = {
            step: _slope(losses[max(step - _SPAN, 0) : step + _SPAN + 1]) for step in range(first, lowest + 1)
        }
        best = min(slopes, key=lambda step: slopes[step])
        return None if slopes[best] >= 0 else self.rates[best]

    def __str__(self) -> str:
        suggestion = self.suggestion
        if suggestion is not None:
            text = f"Suggested learning rate: {suggestion:.2g}"
        elif not math.isfinite(self.losses[0]):
            text = "The first loss is not finite; check the model and the data"
        elif len(_before_divergence(self.losses)) < _MIN_STEPS:
            text = f"The loss diverged within {_MIN_STEPS} steps; start at a lower learning rate"
        else:
            text = "The loss did not fall at any of these rates; check the model and the data"
        return f"{text} ({len(self.rates)} steps from {self.rates[0]:.2g} to {self.rates[-1]:.2g})."

    def plot(self, path: str | Path) -> Path:
        """Atomically write a PNG plot of the losses against the learning rate.

        Raises:
            MissingPackageError: matplotlib is not installed.
        """
        with extra("plots"):
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes: Any = figure.add_subplot()
        smoothed = self.smoothed
        axes.plot(self.rates, self.losses, alpha=0.4, label="loss")
        axes.plot(self.rates[: len(smoothed)], smoothed, label="smoothed loss")
        if (suggestion := self.suggestion) is not None:
            axes.axvline(suggestion, linestyle="--", color="gray", label=f"suggestion: {suggestion:.2g}")
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
        axes.legend()
        path = Path(path)
        with atomic_write(path) as temporary:
            figure.savefig(temporary, format="png", dpi=120)
        return path


def _before_divergence(losses: Sequence[float]) -> list[float]:
    """Return the finite losses. If the sweep ended because it diverged, omit the first large loss and all later ones.

    In a sweep that does not diverge, a large loss is noise from a single batch.
    """
    finite = [loss for loss in losses if math.isfinite(loss)]
    average = _average(finite)
    if len(finite) <= SETTLING:
        return finite
    best = min(average[SETTLING:])
    limit = divergence_limit(best)
    if average[-1] <= limit:
        return finite
    end = next(step for step in range(average.index(best), len(finite)) if finite[step] > limit)
    return finite[:end]


def _average(losses: Sequence[float]) -> list[float]:
    """Return the exponential moving average of the losses, with bias correction."""
    average, averages = 0.0, []
    for step, loss in enumerate(losses, start=1):
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        averages.append(average / (1 - SMOOTHING**step))
    return averages


def _slope(values: Sequence[float]) -> float:
    """Return the slope, per step, of the least-squares line through the values."""
    middle, mean = (len(values) - 1) / 2, fmean(values)
    covariance = sum((i - middle) * (value - mean) for i, value in enumerate(values))
    return covariance / sum((i - middle) ** 2 for i in range(len(values)))


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
    if not 0 < start < end < math.inf:
        raise ConfigError(f"requires 0 < start < end, not start={start!r} and end={end!r}", "find_lr")
    if steps < _MIN_STEPS:
        raise ConfigError(f"requires at least {_MIN_STEPS} steps, not {steps}", "find_lr")
    make_observer = partial(LrSweep, start=start, end=end, steps=steps)
    try:
        with Process(make_job(Setting(constant_lr=True)), make_observer) as process:
            sweep = process.wait_for("sweep", max(deadline - time.monotonic(), 0.0))
    except TrialError as failure:
        if failure.status == "timed out":
            finished = len(failure.warmup_seconds)
            raise budget_error(budget, "the learning rate range test", finished, steps) from None
        raise SlipstreamError(
            f"the learning rate range test did not finish ({failure.status}): {failure.reason}"
        ) from None
    return LrRange(sweep["rates"], sweep["losses"])
