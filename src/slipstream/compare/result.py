"""Write the result of a comparison as a table, Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slipstream.compare.measure import FINAL_TOLERANCE, WARMUP, Comparison, Entry
from slipstream.files import write_text
from slipstream.tune.options import EXACT, LOW_PRECISION
from slipstream.tune.process import incomplete_note
from slipstream.tune.statistics import Estimate

__all__ = ["HEADER", "as_dict", "markdown", "rows", "write"]

HEADER = (
    "contender",
    "ms per step, median (interval)",
    "speed relative to the loop (interval)",
    "samples/s",
    "peak MiB",
    "final loss",
    "losses",
)


def rows(comparison: Comparison) -> Iterator[list[str]]:
    """Yield the table cells of each contender."""
    for entry in comparison.entries:
        yield [entry.label, *_measurement_cells(entry, comparison.samples_per_step), _status(entry)]


def markdown(comparison: Comparison, environment: Mapping[str, Any]) -> str:
    """Return the result as a Markdown page."""
    lines = [f"# Comparison of training steps: {comparison.name}", ""]
    lines += [f"- {name}: {value}" for name, value in environment.items()]
    lines += ["", f"| {' | '.join(HEADER)} |", "|---|---:|---:|---:|---:|---:|---|"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows(comparison)]
    return "\n".join([*lines, "", _note(comparison), ""])


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """Return all values as built-in types; times are in seconds and memory in MiB."""
    return {
        **asdict(comparison),
        "entries": [{**asdict(e), "step": e.step and asdict(e.step)} for e in comparison.entries],
    }


def write(comparison: Comparison, environment: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write `compare.json` and `compare.md` to an existing folder, and return their paths."""
    content = json.dumps({**environment, **as_dict(comparison)}, indent=1)
    files = {
        folder / "compare.json": f"{content}\n",
        folder / "compare.md": markdown(comparison, environment),
    }
    for path, text in files.items():
        write_text(path, text)
    return list(files)


def _measurement_cells(entry: Entry, samples: int) -> list[str]:
    if entry.step is None or entry.ratio is None:
        return [""] * 5
    final = "" if entry.final_loss is None else f"{entry.final_loss:.6g}"
    rate = f"{samples / entry.step.ratio:.1f}"
    return [_milliseconds(entry.step), _ratio(entry.ratio), rate, f"{entry.peak_mib:.0f}", final]


def _ratio(estimate: Estimate) -> str:
    return f"{estimate.ratio:.2f} ({estimate.low:.2f} to {estimate.high:.2f})"


def _milliseconds(estimate: Estimate) -> str:
    median, low, high = (f"{1e3 * value:.4g}" for value in (estimate.ratio, estimate.low, estimate.high))
    return f"{median} ({low} to {high})"


def _status(entry: Entry) -> str:
    if entry.status == "same losses":
        return "same as the loop"
    return f"{entry.status}: {entry.reason}" if entry.reason else entry.status


def _note(comparison: Comparison) -> str:
    stopped = f" {incomplete_note('measurement', comparison.stopped)}" if comparison.stopped else ""
    count = max((len(entry.seconds) for entry in comparison.entries), default=0)
    return (
        f"n = {count} round{'s' * (count != 1)} of {comparison.steps} step{'s' * (comparison.steps != 1)}. "
        "In each round, every contender trains once, in rotating order, while the others' processes wait. The ratio is "
        "the median of the per-round ratios. Each interval lies between two order statistics and contains the median "
        "with a probability of at least 90% for five or more independent rounds; with fewer rounds, it is the range of "
        "the values. All contenders start from the same weights and train on the same prepared batches, which are "
        "repeated, so the times do not include data loading. The losses are considered equal if the first one differs "
        f"from the loop's by at most {EXACT.first:g} (relative), the mean of the first {WARMUP} by at most "
        f"{EXACT.mean:g}, and the final one by at most {FINAL_TOLERANCE:g} of the loop's first loss. With low "
        f"precision, the first two limits are {LOW_PRECISION.first:g} and {LOW_PRECISION.mean:g}. The peak memory is "
        f"that of the process on a CPU, and of torch's allocator on a GPU.{stopped}"
    )
