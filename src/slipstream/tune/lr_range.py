"""Learning rate range test (Smith 2017, Cyclical Learning Rates): the loss while the learning rate increases."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError, SlipstreamError
from slipstream.extras import extra
from slipstream.files import replacing
from slipstream.tune.jobs import Setting
from slipstream.tune.observer import SETTLING, SMOOTHING, LrSweep
from slipstream.tune.process import Job, Process, TrialError

__all__ = ["LrRange", "sweep_lr"]

_FEWEST = 10
_SMALLEST_FALL = 1e-3
"""Relative fall of the smoothed loss below which there is no suggestion."""


@dataclass(frozen=True)
class LrRange:
    """The losses of a learning rate range test."""

    rates: list[float]
    """The learning rate of each step."""
    losses: list[float]
    """The loss of each step, before its update. The last one may not be finite."""

    @property
    def smoothed(self) -> list[float]:
        """The finite losses, as an exponential moving average with bias correction."""
        average, found = 0.0, []
        for step, loss in enumerate(filter(math.isfinite, self.losses), start=1):
            average = SMOOTHING * average + (1 - SMOOTHING) * loss
            found.append(average / (1 - SMOOTHING**step))
        return found

    @property
    def suggestion(self) -> float | None:
        """The learning rate at which the smoothed loss falls fastest per factor of the rate; None if it never falls."""
        losses = self.smoothed
        first = min(SETTLING, len(losses) // 4)
        if len(losses) < _FEWEST or losses[first] - min(losses) <= _SMALLEST_FALL * abs(losses[first]):
            return None
        lowest = losses.index(min(losses))
        steps = range(max(first, 1), min(lowest, len(losses) - 2) + 1)
        # The rates increase by a constant factor, so differences of losses are proportional to the derivative.
        falls = {step: losses[step - 1] - losses[step + 1] for step in steps}
        best = max(falls, key=lambda step: falls[step], default=None)
        return None if best is None or falls[best] <= 0 else self.rates[best]

    def __str__(self) -> str:
        found = self.suggestion
        text = (
            "The loss does not fall at any of these rates; check the model and the data"
            if found is None
            else f"Suggested learning rate: {found:.2g}"
        )
        return f"{text} ({len(self.rates)} steps from {self.rates[0]:.2g} to {self.rates[-1]:.2g})."

    def plot(self, path: str | Path) -> Path:
        """Write a PNG file with the losses over the learning rate, atomically.

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
        if (found := self.suggestion) is not None:
            axes.axvline(found, linestyle="--", color="gray", label=f"suggestion: {found:.2g}")
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
        axes.legend()
        path = Path(path)
        with replacing(path) as temporary:
            figure.savefig(temporary, format="png", dpi=120)
        return path


def sweep_lr(
    make_job: Callable[[Setting], Job], start: float, end: float, steps: int, budget: float
) -> LrRange:
    """Run the test in a process of its own, so that the model, the optimizer and all random states are unchanged.

    Raises:
        ConfigError: an argument is out of range.
        SlipstreamError: the run fails or does not end within `budget` seconds.
    """
    if not 0 < start < end < math.inf:
        raise ConfigError(f"requires 0 < start < end, not start={start!r} and end={end!r}", "find_lr")
    if steps < _FEWEST:
        raise ConfigError(f"requires at least {_FEWEST} steps, not {steps}", "find_lr")
    make_observer = partial(LrSweep, start=start, end=end, steps=steps)
    try:
        with Process(make_job(Setting(constant_lr=True)), make_observer) as process:
            found = process.wait_for("sweep", budget)
    except TrialError as failure:
        raise SlipstreamError(f"the learning rate range test {failure.status}: {failure.reason}") from None
    return LrRange(found["rates"], found["losses"])
