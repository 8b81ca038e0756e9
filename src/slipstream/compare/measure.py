"""Time the contenders in turn, and compare their losses."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from slipstream.compare.contenders import CONTENDERS, Work
from slipstream.compare.subject import Batches, Subject, model_loss
from slipstream.errors import SlipstreamError
from slipstream.extras import is_installed
from slipstream.tune.observer import Observer, Timer
from slipstream.tune.options import EXACT, LOW_PRECISION
from slipstream.tune.process import Process, TrialError
from slipstream.tune.statistics import Estimate, difference, estimate

__all__ = ["FINAL_TOLERANCE", "WARMUP", "Comparison", "Entry", "compare"]

WARMUP = 10
"""Number of untimed steps at the beginning. The losses of these steps are compared."""
FINAL_TOLERANCE = 0.05
"""Maximum difference between the final losses, relative to the first loss of the loop.

The final loss is not used as the reference, because rounding differences accumulate over the steps and the final loss
may be close to 0.
"""


@dataclass(frozen=True)
class Entry:
    """The measurement of one contender."""

    name: str
    """The key in `CONTENDERS`."""
    label: str
    status: str = "same losses"
    """`same losses`, `different losses`, `not installed`, `out of memory`, `timed out` or `failed`."""
    reason: str = ""
    seconds: list[float] = field(default_factory=list)
    """Mean step time of each round."""
    ratio: Estimate | None = None
    """The loop's step time divided by the contender's. A value above 1 means that the contender is faster."""
    peak_mib: float | None = None
    first_loss: float | None = None
    final_loss: float | None = None
    """Loss of the last step of the last round."""

    @property
    def step(self) -> Estimate | None:
        """Median step time in seconds, with its confidence interval."""
        return estimate(self.seconds) if self.seconds else None


@dataclass(frozen=True)
class Comparison:
    """The measurements of all contenders."""

    name: str
    entries: list[Entry]
    steps: int
    """Timed steps per round."""
    rounds: int
    samples_per_step: int
    stopped: str = ""
    """The reason why the measurement ended early; empty if the measurement is complete."""


@dataclass(frozen=True)
class _Job:
    """Trains with one contender; see `Job`. Each process has its own copy of the subject."""

    name: str
    subject: Subject

    def train(self, observer: Observer, folder: Path) -> None:
        subject = self.subject
        loader = DataLoader(Batches(subject.batches), batch_size=None)
        work = Work(
            subject.model,
            loader,
            model_loss,
            lambda net: subject.optimizer,
            str(folder),
            device=subject.device,
            observer=observer,
        )
        CONTENDERS[self.name].train(work)


class _Running:
    """A contender that has completed the warm-up steps."""

    def __init__(self, name: str, process: Process, warm: Mapping[str, Any]) -> None:
        self.name, self.process = name, process
        self.losses: list[float] = warm["losses"]
        self.problem: str | None = warm.get("problem")
        self.low_precision = "precision" in warm.get("options", ())
        self.peak_mib = float(warm["peak_mib"])
        self.seconds: list[float] = []
        self.final = math.nan

    def time(self, steps: int, timeout: float) -> None:
        timed = self.process.time(steps, 1, timeout)
        self.seconds.append(timed["seconds"])
        self.peak_mib, self.final = float(timed["peak_mib"]), float(timed["loss"])


def compare(
    subject: Subject,
    names: Sequence[str],
    steps: int = 10,
    rounds: int = 9,
    timeout: float = 900.0,
    report: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Train the subject with each contender in its own process, and time the contenders in turn.

    In each round, every contender runs one untimed and `steps` timed steps, while the others wait. The order rotates
    from round to round. Ctrl-C stops the measurement; the results of the finished rounds are returned.

    Args:
        subject: what to train.
        names: keys of `CONTENDERS`; the hand-written loop is always added.
        steps: timed steps per round.
        rounds: number of rounds.
        timeout: time limit in seconds for a contender's startup and for each of its rounds.
        report: called with a line of text when a contender has started or cannot be measured, and after each round.

    Raises:
        SlipstreamError: the hand-written loop cannot be measured.
    """
    measurement = _Measurement(subject, steps, timeout, report)
    stopped = ""
    with ExitStack() as stack:
        try:
            for name in CONTENDERS:
                if name == "loop" or name in names:
                    measurement.start(name, stack)
            for index in range(rounds):
                measurement.round(index)
                report(f"round {index + 1} of {rounds}")
        except KeyboardInterrupt:
            stopped = "interrupted"
    return Comparison(subject.name, measurement.entries(), steps, rounds, subject.samples_per_step, stopped)


class _Measurement:
    def __init__(self, subject: Subject, steps: int, timeout: float, report: Callable[[str], None]) -> None:
        self._subject, self._steps, self._timeout, self._report = subject, steps, timeout, report
        self._running: dict[str, _Running] = {}
        self._ended: dict[str, Entry] = {}

    def start(self, name: str, stack: ExitStack) -> None:
        """Start a contender and wait until it has completed the warm-up steps."""
        contender = CONTENDERS[name]
        entry = Entry(name, contender.label)
        if not is_installed(contender.package):
            reason = f"{contender.package} is missing; run: pip install 'slipstream[peers]'"
            self._end(replace(entry, status="not installed", reason=reason))
            return
        start_time = time.monotonic()
        process = stack.enter_context(Process(_Job(name, self._subject), partial(Timer, warmup=WARMUP)))
        try:
            running = _Running(name, process, process.wait_for("warm", self._timeout))
        except TrialError as failure:
            process.end()
            self._fail(entry, failure)
            return
        if running.problem:
            process.end()
            self._end(replace(entry, status="failed", reason=running.problem))
            return
        self._running[name] = running
        self._report(f"{contender.label}: ready after {time.monotonic() - start_time:.0f} s")

    def round(self, index: int) -> None:
        """Time all contenders once."""
        order = list(self._running.values())
        turn = index % len(order)
        for running in order[turn:] + order[:turn]:
            try:
                running.time(self._steps, self._timeout)
            except TrialError as failure:
                running.process.end()
                del self._running[running.name]
                self._fail(Entry(running.name, CONTENDERS[running.name].label), failure)

    def entries(self) -> list[Entry]:
        """Return the measurements in the order of `CONTENDERS`."""
        loop = self._running.get("loop")
        entries = dict(self._ended)
        if loop is not None:
            entries |= {name: _entry(running, loop) for name, running in self._running.items()}
        return [entries[name] for name in CONTENDERS if name in entries]

    def _fail(self, entry: Entry, failure: TrialError) -> None:
        if entry.name == "loop":
            raise SlipstreamError(
                f"cannot measure the hand-written loop ({failure.status}): {failure.reason}"
            )
        self._end(replace(entry, status=failure.status, reason=failure.reason))

    def _end(self, entry: Entry) -> None:
        self._ended[entry.name] = entry
        self._report(f"{entry.label}: {entry.status}: {entry.reason}")


def _entry(running: _Running, loop: _Running) -> Entry:
    """Return a contender's measurement, excluding incomplete rounds."""
    count = min(len(running.seconds), len(loop.seconds))
    ratios = [a / b for a, b in zip(loop.seconds[:count], running.seconds[:count], strict=True)]
    entry = Entry(
        running.name,
        CONTENDERS[running.name].label,
        seconds=running.seconds[:count],
        ratio=estimate(ratios) if ratios else None,
        peak_mib=running.peak_mib,
        first_loss=running.losses[0],
        final_loss=running.final if count else None,
    )
    reason = _difference(running, loop, count)
    return replace(entry, status="different losses", reason=reason) if reason else entry


def _difference(running: _Running, loop: _Running, count: int) -> str:
    """Return a message if the losses differ from the loop's by more than the tolerance, otherwise an empty string."""
    allowed = LOW_PRECISION if running.low_precision else EXACT
    first, mean = difference(running.losses, loop.losses)
    if not (first <= allowed.first and mean <= allowed.mean):  # also for NaN
        return (
            f"the first loss differs by {first:.2g} (allowed: {allowed.first:g}), and the mean of the first "
            f"{WARMUP} losses by {mean:.2g} (allowed: {allowed.mean:g})"
        )
    if not count or len(running.seconds) != len(loop.seconds):  # the numbers of steps differ
        return ""
    final = abs(running.final - loop.final) / max(abs(loop.losses[0]), 1e-12)
    if not final <= FINAL_TOLERANCE:
        return f"the final loss differs by {final:.2g} times the first loss (allowed: {FINAL_TOLERANCE:g})"
    return ""
