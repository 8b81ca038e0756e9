"""Greedy search for the fastest combination of options within a time budget."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, median
from typing import Any

from slipstream.errors import ConfigError, NonFiniteLossError, SlipstreamError
from slipstream.speed import Capabilities
from slipstream.tune.jobs import Setting, merged_speed
from slipstream.tune.observer import Timer
from slipstream.tune.options import LOW_PRECISION, Candidate, candidates, unsupported_reason
from slipstream.tune.process import WARMUP, Job, Process, TrialError, format_seconds
from slipstream.tune.statistics import Estimate, difference, estimate

_MIN_ROUNDS, _MAX_ROUNDS = 5, 24
_MAX_ROUND_SECONDS = 2.0
# Fraction of the budget that is reserved for terminating processes and writing files.
_MARGIN = 0.02
# Minimum ratio for which an option is adopted.
MIN_GAIN = 1.01
# A trial ends after three or more rounds if its ratio is below this value in all of them.
_EARLY_STOP_RATIO = 0.8
# After this fraction of the budget, a trial ends as soon as it has the minimum number of rounds.
_ROUNDS_FRACTION = 0.12
_NO_TIME = "the time budget ran out"


@dataclass(frozen=True)
class Row:
    """The result of one trial."""

    label: str
    status: str
    """`adopted`, `slower`, `no gain`, `inconclusive`, `rejected`, `failed`, `out of memory`, `timed out`, `skipped` or
    `not measured`."""
    reason: str = ""
    against: str = "baseline"
    """The options of the plan with which the trial was compared."""
    estimate: Estimate | None = None
    """Step time of that plan divided by the step time of the trial; a value above 1 means that the trial is faster."""
    step_seconds: float | None = None
    peak_mib: float | None = None
    compile_seconds: float | None = None
    loss_difference: tuple[float, float] | None = None
    """Relative differences of the first loss and the mean loss from those of the baseline."""
    setting: Setting = field(default_factory=Setting)
    """The changes that this trial makes, without the changes in the plan."""


@dataclass
class Outcome:
    """The results of a search."""

    rows: list[Row] = field(default_factory=list)
    setting: Setting = field(default_factory=Setting)
    """The adopted changes."""
    adopted: list[str] = field(default_factory=list)
    baseline_seconds: float = 0.0
    """Step time of the baseline, in seconds."""
    baseline_mib: float = 0.0
    total: Estimate | None = None
    """Step time of the baseline divided by that of the plan; None if no option is adopted, or if there was no time to
    measure several adopted options together."""
    compile_seconds: float = 0.0
    """Compilation time of the plan, in seconds."""
    steps_per_epoch: int | None = None
    device: str = "cpu"
    seconds: float = 0.0
    """Duration of the search."""
    budget: float = 0.0
    stopped: str = ""
    """Why the search ended early; empty if it is complete."""


class _Running:
    """A trial process after its warm-up, with the values that it has reported."""

    def __init__(self, process: Process, warm: Mapping[str, Any], startup: float) -> None:
        self.process, self.warm = process, warm
        # Seconds from the start of the process to the end of its warm-up.
        self.startup = startup
        self.step_seconds = median(process.warmup_seconds[len(process.warmup_seconds) // 2 :])
        # Duration of the warm-up minus the expected duration of its steps, in seconds.
        self.extra = max(sum(process.warmup_seconds) - len(process.warmup_seconds) * self.step_seconds, 0.0)
        self.untimed = 1 + int(warm["buffered"])  # exclude batches that were loaded while the process waited
        self.seconds: list[float] = []
        self.peak_mib = float(warm["peak_mib"])

    def time(self, seconds: float, timeout: float) -> float:
        """Run steps for about `seconds` seconds, and return the mean step time in seconds."""
        steps = max(2, math.ceil(seconds / max(self.step_seconds, 1e-6)))
        window = int(self.warm["accumulate"])  # all rounds must contain the same fraction of updates
        timed = self.process.time(math.ceil(steps / window) * window, self.untimed, timeout)
        self.seconds.append(timed["seconds"])
        self.step_seconds, self.peak_mib = self.seconds[-1], float(timed["peak_mib"])
        return self.step_seconds

    def round_seconds(self, seconds: float) -> float:
        """Return the expected duration of a round with `seconds` of timed steps."""
        window = int(self.warm["accumulate"]) * self.step_seconds
        return max(2 * self.step_seconds, seconds + window) + self.untimed * self.step_seconds


class Search:
    """Measure the candidates one at a time, each combined with the options adopted so far.

    Args:
        make_job: a function that returns the run for a setting.
        speed: the baseline's value of `speed`.
        names: options to measure, as returned by `check_names`.
        budget: time limit in seconds.
        report: called with each new row.
        start: the time at which the budget starts, as returned by `time.monotonic()`; None means now.
    """

    def __init__(
        self,
        make_job: Callable[[Setting], Job],
        speed: Any,
        names: Sequence[str],
        budget: float,
        report: Callable[[Row], None] = lambda row: None,
        start: float | None = None,
    ) -> None:
        self._make_job, self._speed, self._names, self._report = make_job, speed, names, report
        self._round = min(budget / 300, _MAX_ROUND_SECONDS)  # seconds of timed steps per round
        self._start = time.monotonic() if start is None else start
        self._plan_stack: ExitStack | None = None  # terminates the process that runs the current plan
        self.outcome = Outcome(budget=budget)

    def run(self) -> Outcome:
        """Run the search and return its results, which are partial after Ctrl-C.

        All processes are terminated before this method returns.

        Raises:
            ConfigError: the budget is too short for one trial.
            SlipstreamError: training with the baseline's options failed.
        """
        outcome = self.outcome
        with ExitStack() as stack:
            self._exit = stack
            try:
                self._cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-tune-"))
                self._baseline = self._current = self._start_baseline()
                self._measure()
            except KeyboardInterrupt:
                outcome.stopped = "interrupted"
        if any(row.status in ("not measured", "timed out") for row in outcome.rows):
            outcome.stopped = outcome.stopped or _NO_TIME
        outcome.seconds = time.monotonic() - self._start
        return outcome

    @property
    def _remaining(self) -> float:
        return (1 - _MARGIN) * self.outcome.budget - (time.monotonic() - self._start)

    @property
    def _rounds_seconds(self) -> float:
        """Expected duration of the minimum number of rounds."""
        return 2 * _MIN_ROUNDS * self._current.round_seconds(self._round)

    def _start_baseline(self) -> _Running:
        budget = format_seconds(self.outcome.budget)
        try:
            running = self._launch(Setting(), self._exit, self._remaining)
        except TrialError as failure:
            if failure.status == "timed out":
                raise ConfigError(f"{budget} is too short for the baseline: {failure}", "budget") from None
            raise SlipstreamError(f"training the baseline failed ({failure.status}): {failure}") from None
        warm, outcome = running.warm, self.outcome
        if not all(map(math.isfinite, warm["losses"])):
            raise NonFiniteLossError(f"the losses of the baseline are not finite: {warm['losses']}")
        if warm["problem"]:
            raise SlipstreamError(f"the baseline's own options are not in effect: {warm['problem']}")
        needed = 2 * running.startup + 2 * _MIN_ROUNDS * running.round_seconds(self._round)
        if needed > outcome.budget:
            minimum = format_seconds(needed)
            raise ConfigError(
                f"{budget} is too short for one trial; the estimated minimum is {minimum}", "budget"
            )
        self._capabilities: Capabilities = warm["capabilities"]
        outcome.baseline_mib, outcome.baseline_seconds = running.peak_mib, running.step_seconds
        outcome.steps_per_epoch, outcome.device = warm["steps_per_epoch"], self._capabilities.device
        return running

    def _measure(self) -> None:
        outcome, warm = self.outcome, self._baseline.warm
        options = list(candidates(self._names, self._capabilities, warm["num_workers"], warm["shapes"]))
        try:
            for candidate in options:
                row = self._try(candidate)
                outcome.rows.append(row)
                self._report(row)
            if len(outcome.adopted) > 1:
                outcome.total = self._alternate(self._baseline, self._current, self._remaining)
                if outcome.total is not None and outcome.total.ratio < 1:
                    self._withdraw(outcome.total)
        except _PlanFailedError as error:
            outcome.stopped = f"the process running the current plan exited: {error}"
        outcome.baseline_seconds = median(self._baseline.seconds or [self._baseline.step_seconds])

    def _launch(self, setting: Setting, stack: ExitStack, timeout: float) -> _Running:
        """Start a process and wait for the end of its warm-up, at most `timeout` seconds."""
        begin = time.monotonic()
        job = self._make_job(replace(setting, compile_cache=self._cache))
        process = stack.enter_context(Process(job, partial(Timer, warmup=WARMUP)))
        warm = process.wait_for("warm", max(timeout, 0.0))
        return _Running(process, warm, time.monotonic() - begin)

    def _try(self, candidate: Candidate) -> Row:
        plan = " + ".join(self.outcome.adopted) or "baseline"
        row = Row(candidate.label, "skipped", against=plan, setting=candidate.setting)
        if reason := self._skip_reason(candidate):
            return replace(row, reason=reason)
        # A plan with several options is measured at the end.
        timeout = self._remaining - self._rounds_seconds * (2 if self.outcome.adopted else 1)
        if timeout < self._current.startup:
            return replace(row, status="not measured", reason=_NO_TIME)
        with ExitStack() as stack:
            try:
                setting = self.outcome.setting.merge(candidate.setting)
                trial = self._launch(setting, stack, timeout)
                row = self._compare(candidate, trial, row)
            except TrialError as failure:
                return replace(row, status=failure.status, reason=failure.reason)
            if row.status == "adopted":
                self._adopt(candidate, trial, row, stack.pop_all())
        return row

    def _skip_reason(self, candidate: Candidate) -> str | None:
        if own := self._baseline.warm["sources"].get(candidate.option):
            return f"already set by the run ({own})"
        works = ("adopted", "slower", "no gain", "inconclusive")
        if any(row.label == candidate.fallback_for and row.status in works for row in self.outcome.rows):
            return f"not needed, because {candidate.fallback_for} works"
        if candidate.requires and candidate.requires not in self.outcome.setting.speed:
            return f"{candidate.requires} is not part of the plan"
        speed = merged_speed(self._speed, self.outcome.setting.merge(candidate.setting).speed)
        return unsupported_reason(candidate.setting, speed, self._capabilities)

    def _compare(self, candidate: Candidate, trial: _Running, row: Row) -> Row:
        row = replace(row, peak_mib=trial.peak_mib)
        if trial.warm["problem"]:
            return replace(row, status="failed", reason=trial.warm["problem"])
        first, mean = difference(trial.warm["losses"], self._current.warm["losses"])
        combined = {**self._baseline.warm["sources"], **self.outcome.setting.merge(candidate.setting).speed}
        # Low precision amplifies the rounding differences caused by other options.
        allowed = LOW_PRECISION if "precision" in combined else candidate.tolerance
        row = replace(row, loss_difference=(first, mean))
        if "compile" in combined:
            row = replace(row, compile_seconds=max(trial.extra - self._baseline.extra, 0.0))
        if not (first <= allowed.first and mean <= allowed.mean):  # true for NaN
            return replace(
                row,
                status="rejected",
                reason=f"different losses: the first loss differs by {first:.2g} (allowed: {allowed.first:g}), and "
                f"the mean of {WARMUP} losses by {mean:.2g} (allowed: {allowed.mean:g})",
            )
        measured = self._alternate(self._current, trial, _ROUNDS_FRACTION * self.outcome.budget)
        if measured is None:
            return replace(row, status="not measured", reason=_NO_TIME)
        seconds = fmean(trial.seconds)
        row = replace(row, estimate=measured, peak_mib=trial.peak_mib, step_seconds=seconds)
        return replace(row, status=_status(measured))

    def _alternate(self, current: _Running, trial: _Running, seconds: float) -> Estimate | None:
        """Return the ratio of the step times from alternating rounds, or None if there was no time for enough rounds.

        After `seconds`, the measurement ends as soon as it has the minimum number of rounds.
        """
        ratios: list[float] = []
        end = time.monotonic() + seconds
        while len(ratios) < (_MAX_ROUNDS if time.monotonic() < end else _MIN_ROUNDS):
            if self._remaining < current.round_seconds(self._round) + trial.round_seconds(self._round):
                break
            pair = (current, trial) if len(ratios) % 2 == 0 else (trial, current)
            times = {id(each): self._time(each, current) for each in pair}
            ratios.append(times[id(current)] / times[id(trial)])
            if _is_decided(ratios):
                break
        slower = len(ratios) >= 3 and max(ratios) < _EARLY_STOP_RATIO
        return estimate(ratios) if slower or len(ratios) >= _MIN_ROUNDS else None

    def _time(self, running: _Running, current: _Running) -> float:
        try:
            return running.time(self._round, max(self._remaining, 0.1))
        except TrialError as failure:
            if running is current and failure.status != "timed out":
                raise _PlanFailedError(f"{failure.status}: {failure.reason}") from None
            raise

    def _adopt(self, candidate: Candidate, trial: _Running, row: Row, stack: ExitStack) -> None:
        """Make the trial the current plan. Terminate the previous plan's process, unless it is the baseline's."""
        outcome = self.outcome
        outcome.setting = outcome.setting.merge(candidate.setting)
        outcome.adopted.append(candidate.label)
        outcome.total = row.estimate if len(outcome.adopted) == 1 else None
        outcome.compile_seconds = max(outcome.compile_seconds, row.compile_seconds or 0.0)
        self._current = trial
        previous, self._plan_stack = self._plan_stack, stack
        self._exit.push(stack)
        if previous is not None:
            previous.close()

    def _withdraw(self, total: Estimate) -> None:
        """Return to the baseline, because the options of the plan are not faster in combination."""
        outcome = self.outcome
        reason = f"{' + '.join(outcome.adopted)} combined: {total.ratio:.2f} times the speed of the baseline"
        outcome.rows = [
            replace(row, status="inconclusive", reason=reason) if row.status == "adopted" else row
            for row in outcome.rows
        ]
        outcome.setting, outcome.adopted, outcome.total, outcome.compile_seconds = Setting(), [], None, 0.0


class _PlanFailedError(Exception):
    """The process that runs the current plan has exited."""


def _is_decided(ratios: Sequence[float]) -> bool:
    """Return whether the result is clear, in which case no more rounds are needed."""
    if len(ratios) >= 3 and max(ratios) < _EARLY_STOP_RATIO:
        return True
    if len(ratios) < _MIN_ROUNDS:
        return False
    result = estimate(ratios)
    return result.low > MIN_GAIN or result.high < 1 or result.width < 0.02


def _status(measured: Estimate) -> str:
    if measured.low > 1 and measured.ratio >= MIN_GAIN:
        return "adopted"
    if measured.high < 1:
        return "slower"
    return "no gain" if measured.width < 0.05 else "inconclusive"
