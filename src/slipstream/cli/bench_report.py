"""The results of `slipstream bench` as JSON, Markdown and a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from slipstream.cli.bench_cell import Cell
from slipstream.extras import is_installed
from slipstream.files import replacing

__all__ = ["Measured", "median_interval", "write_report"]

_COLUMNS = (
    "recipe",
    "options",
    "ms per step, median (interval)",
    "samples/s",
    "speed relative to eager, 1 device, float32",
    "memory, MiB",
)
_NOTE = (
    "Each row is a process (or several) of its own. The interval contains the median with a probability of at least "
    "95% if the steps are independent; with fewer than 6 steps it is the range. Slow phases of the machine affect "
    "whole rows, so repeat the command before you compare rows that are close. Memory is the peak of the first "
    "process: on the device, or the resident memory of the whole process on a CPU."
)


@dataclass(frozen=True)
class Measured:
    """The result of one cell: the duration of each timed step, or the reason why there is none."""

    cell: Cell
    seconds: Sequence[float] = ()
    samples_per_step: int = 0
    """Over all processes."""
    memory: int = 0
    """Peak memory of the first process in bytes; see `StepTimer.memory`."""
    threads: int = 0
    """Torch threads of each process."""
    error: str = ""

    def summary(self) -> str:
        """Return the step time and the speed, or the error."""
        if self.error:
            return f"failed: {self.error}"
        low, high = median_interval(self.seconds)
        typical = median(self.seconds)
        return (
            f"{typical * 1e3:.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f}), "
            f"{self.samples_per_step / typical:.1f} samples/s"
        )


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a confidence interval of the median of at least 95%, from the order statistics (no assumption is made).

    With fewer than 6 values there is no such interval, and the minimum and the maximum are returned.
    """
    n, tail, rank = len(values), 0.0, 0
    while (tail := tail + math.comb(n, rank) * 0.5**n) <= 0.025:
        rank += 1
    ordered = sorted(values)
    return ordered[max(rank - 1, 0)], ordered[n - max(rank, 1)]


def write_report(out: Path, facts: Mapping[str, Any], found: Sequence[Measured], picture: bool) -> list[Path]:
    """Write `bench.json` and `bench.md`, and with `picture` and matplotlib `bench.png`. Return the files."""
    files = [out / "bench.json", out / "bench.md"]
    cells = [{**asdict(m), "interval": median_interval(m.seconds) if m.seconds else None} for m in found]
    for path, text in zip(
        files, [json.dumps({**facts, "cells": cells}, indent=1), _markdown(facts, found)], strict=True
    ):
        with replacing(path) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")
    if picture and any(m.seconds for m in found):
        if is_installed("matplotlib"):
            files.append(_draw(out / "bench.png", facts, found))
        else:
            print("No picture, because matplotlib is not installed; run: pip install 'slipstream[plots]'")
    return files


def _markdown(facts: Mapping[str, Any], found: Sequence[Measured]) -> str:
    lines = ["# Training speed", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    bases = [m for m in found if m.seconds and _is_base(m.cell)]
    eager = {m.cell.recipe: median(m.seconds) / m.samples_per_step for m in bases}
    lines += [f"| {' | '.join(_COLUMNS)} |", "|---|---|---:|---:|---:|---:|"]
    for m in found:
        if m.error:
            lines.append(
                f"| {m.cell.recipe} | {m.cell.options} | failed: {m.error.replace('|', '/')} | | | |"
            )
            continue
        low, high = median_interval(m.seconds)
        typical = median(m.seconds)
        base = eager.get(m.cell.recipe)
        relative = f"{base / (typical / m.samples_per_step):.2f}" if base else ""
        lines.append(
            f"| {m.cell.recipe} | {m.cell.options} | {typical * 1e3:.1f} ({low * 1e3:.1f} to {high * 1e3:.1f}) | "
            f"{m.samples_per_step / typical:.1f} | {relative} | {m.memory / 2**20:.0f} |"
        )
    return "\n".join([*lines, "", _NOTE])


def _is_base(cell: Cell) -> bool:
    return not (cell.compiled or cell.amp or cell.averaging) and cell.processes == 1


def _draw(path: Path, facts: Mapping[str, Any], found: Sequence[Measured]) -> Path:
    """Draw the samples per second of each measured cell with its interval."""
    from matplotlib.figure import Figure

    measured = [m for m in found if m.seconds]
    speeds = [m.samples_per_step / median(m.seconds) for m in measured]
    intervals = [median_interval(m.seconds) for m in measured]
    errors = [
        [
            speed - m.samples_per_step / high
            for speed, m, (_, high) in zip(speeds, measured, intervals, strict=True)
        ],
        [
            m.samples_per_step / low - speed
            for speed, m, (low, _) in zip(speeds, measured, intervals, strict=True)
        ],
    ]
    figure = Figure(figsize=(10, 1.5 + 0.28 * len(measured)), layout="constrained")
    axes = figure.subplots()
    labels = [f"{m.cell.recipe}: {m.cell.options}" for m in measured]
    axes.barh(range(len(measured)), speeds, xerr=errors, capsize=2)
    axes.set_yticks(range(len(measured)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("samples per second (median; interval of the median)")
    axes.set_title(f"{facts['cpu']}, {facts['device']}, torch {facts['torch']}, {facts['date']}", fontsize=8)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return path
