"""Write the results of `slipstream bench` as JSON, Markdown and a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from slipstream.cli.bench_cell import Cell
from slipstream.extras import is_installed
from slipstream.files import atomic_write, write_text
from slipstream.tune.statistics import median_interval

__all__ = ["Measurement", "block_interval", "write_report"]

_COLUMNS = (
    "recipe",
    "options",
    "ms per step, mean (interval of block means)",
    "samples/s",
    "speed relative to eager, 1 device, float32",
    "memory, MiB",
)
_NUM_BLOCKS = 6
"""Minimum number of independent values whose range contains the median with a probability of at least 95%."""
_NOTE = (
    "Each row is measured in separate processes. The step time is the mean of all timed steps. The steps are divided "
    f"into {_NUM_BLOCKS} blocks of consecutive steps, and the interval is the range of the block means. If the block "
    "means are independent and identically distributed, the interval contains the median of their distribution with a "
    "probability of at least 95%. With fewer than "
    f"{_NUM_BLOCKS} steps, no interval is reported. A temporary slowdown of the machine affects whole rows, so repeat "
    "the command before comparing rows with similar times. Memory is the peak memory of the first process: the "
    "device memory on CUDA devices, and the resident memory of the whole process on other devices."
)


@dataclass(frozen=True)
class Measurement:
    """The result of one run: the duration of each timed step, or the error."""

    cell: Cell
    seconds: Sequence[float] = ()
    samples_per_step: float = 0
    """Mean number of samples in a timed step, summed over all processes."""
    memory: int = 0
    """Peak memory of the first process in bytes; see `StepTimer.memory`."""
    threads: int = 0
    """Number of torch threads in each process."""
    error: str = ""

    @property
    def seconds_per_step(self) -> float:
        """Mean duration of the timed steps, including waits and optimizer updates that occur only in some steps."""
        return fmean(self.seconds)

    def milliseconds(self) -> str:
        """Return the step time and its interval in milliseconds, without the unit."""
        bounds = block_interval(self.seconds)
        interval = f" ({bounds[0] * 1e3:.1f} to {bounds[1] * 1e3:.1f})" if bounds else ""
        return f"{self.seconds_per_step * 1e3:.1f}{interval}"

    def summary(self) -> str:
        """Return the step time and the speed, or the error."""
        if self.error:
            return f"failed: {self.error}"
        speed = self.samples_per_step / self.seconds_per_step
        return f"{self.milliseconds()} ms per step, {speed:.1f} samples/s"


def block_interval(seconds: Sequence[float]) -> tuple[float, float] | None:
    """Return the range of the means of 6 blocks of consecutive steps, which together contain all steps.

    The block lengths differ by at most one step.

    Args:
        seconds: duration of each step.

    Returns:
        The interval in seconds, or None if there are fewer than 6 steps.
    """
    if len(seconds) < _NUM_BLOCKS:
        return None
    bounds = [index * len(seconds) // _NUM_BLOCKS for index in range(_NUM_BLOCKS + 1)]
    return median_interval([fmean(seconds[start:stop]) for start, stop in pairwise(bounds)], 0.95)


def write_report(
    out: Path, environment: Mapping[str, Any], measurements: Sequence[Measurement], plot: bool
) -> list[Path]:
    """Write `bench.json`, `bench.md` and, if `plot` is True and matplotlib is installed, `bench.png`.

    Returns:
        The paths of the written files.
    """
    files = [out / "bench.json", out / "bench.md"]
    cells = [{**asdict(m), "interval": block_interval(m.seconds)} for m in measurements]
    for path, text in zip(
        files,
        [json.dumps({**environment, "cells": cells}, indent=1), _markdown(environment, measurements)],
        strict=True,
    ):
        write_text(path, text + "\n")
    if plot and any(m.seconds for m in measurements):
        if is_installed("matplotlib"):
            files.append(_draw(out / "bench.png", environment, measurements))
        else:
            print("No plot was written: matplotlib is not installed. Run: pip install 'slipstream[plots]'")
    return files


def _markdown(environment: Mapping[str, Any], measurements: Sequence[Measurement]) -> str:
    lines = ["# Training speed", "", *(f"- {name}: {value}" for name, value in environment.items()), ""]
    baselines = [m for m in measurements if m.seconds and _is_baseline(m.cell)]
    eager = {m.cell.recipe: m.seconds_per_step / m.samples_per_step for m in baselines}
    lines += [f"| {' | '.join(_COLUMNS)} |", "|---|---|---:|---:|---:|---:|"]
    for m in measurements:
        if m.error:
            lines.append(
                f"| {m.cell.recipe} | {m.cell.options} | failed: {m.error.replace('|', '/')} | | | |"
            )
            continue
        base = eager.get(m.cell.recipe)
        relative = f"{base / (m.seconds_per_step / m.samples_per_step):.2f}" if base else ""
        lines.append(
            f"| {m.cell.recipe} | {m.cell.options} | {m.milliseconds()} | "
            f"{m.samples_per_step / m.seconds_per_step:.1f} | {relative} | {m.memory / 2**20:.0f} |"
        )
    return "\n".join([*lines, "", _NOTE])


def _is_baseline(cell: Cell) -> bool:
    return not (cell.compiled or cell.amp or cell.averaging) and cell.processes == 1


def _draw(path: Path, environment: Mapping[str, Any], measurements: Sequence[Measurement]) -> Path:
    """Plot the samples per second of each successful run, with the interval."""
    from matplotlib.figure import Figure

    successful = [m for m in measurements if m.seconds]
    speeds = [m.samples_per_step / m.seconds_per_step for m in successful]
    bars = [_error_bar(m) for m in successful]
    figure = Figure(figsize=(10, 1.5 + 0.28 * len(successful)), layout="constrained")
    axes = figure.subplots()
    labels = [f"{m.cell.recipe}: {m.cell.options}" for m in successful]
    axes.barh(range(len(successful)), speeds, xerr=[*zip(*bars, strict=True)], capsize=2)
    axes.set_yticks(range(len(successful)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("samples per second (mean of the steps; interval of block means)")
    axes.set_title(
        f"{environment['cpu']}, {environment['device']}, torch {environment['torch']}, {environment['date']}",
        fontsize=8,
    )
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return path


def _error_bar(measurement: Measurement) -> tuple[float, float]:
    """Return the distances from the mean speed to the ends of its interval, in samples per second."""
    low, high = block_interval(measurement.seconds) or (measurement.seconds_per_step,) * 2
    speed, slowest, fastest = (
        measurement.samples_per_step / s for s in (measurement.seconds_per_step, high, low)
    )
    return max(speed - slowest, 0.0), max(fastest - speed, 0.0)  # rounding may make them negative
