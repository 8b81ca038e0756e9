"""Greedy search for the fastest combination of options within a time budget."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, median
from typing import Any

from slipstream.errors import ConfigError, NonFiniteLossError, SlipstreamError
from slipstream.speed import Capabilities
from slipstream.tune.jobs import Setting, merged_speed
from slipstream.tune.observer import Timer
from slipstream.tune.options import LOW_PRECISION, Batches, Candidate, candidates, unsupported_reason
from slipstream.tune.process import WARMUP, Job, Process, TrialError, budget_error, format_seconds
from slipstream.tune.statistics import Estimate, difference, estimate

__all__ = ["MIN_GAIN", "Outcome", "Row", "Search"]

_MIN_ROUNDS, _MAX_ROUNDS = 5, 24
_MAX_ROUND_SECONDS = 2.0
_MARGIN, _MAX_MARGIN = 0.02, 5.0
"""Time reserved for terminating processes and writing files: a fraction of the budget, and the maximum in seconds."""
_MAX_PROCESSES = 3
"""Maximum number of processes to terminate at the deadline: those of the baseline, the plan and a trial."""
MIN_GAIN = 1.01
"""Minimum ratio for which an option is adopted."""
_MIN_CONFIDENCE = 0.85
"""Minimum confidence for which an option is adopted if its interval contains 1. Adopted options do not change the
losses beyond the tolerance, so the only risk is that an option does not help."""
_EARLY_STOP_RATIO = 0.8
"""A trial ends after three or more rounds if its ratio is below this value in all of them."""
_ROUNDS_FRACTION = 0.12
"""A trial has at least this fraction of the budget, or an equal share of the remaining time if that is longer. After
this time, it ends as soon as it has the minimum number of rounds."""


@dataclass(frozen=True)
class Row:
    """The result of one trial."""

    label: str
    status: str
    """`adopted`, `faster` (not part of the plan), `slower`, `no gain`, `inconclusive`, `rejected`, `failed`,
    `out of memory`, `timed out`, `skipped` or `not measured`."""
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

    @property
    def reference(self) -> str:
        """The plan with which the trial was compared, for messages."""
        return "the baseline" if self.against == "baseline" else self.against


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
    """Step time of the baseline divided by that of the plan; None if no option is adopted."""
    total_is_product: bool = False
    """Whether `total` is the product of the options' ratios instead of a direct measurement. In this case, its `low`
    and `high` are also products, which do not form a confidence interval."""
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

    def __init__(self, process: Process, warm: Mapping[str, Any], startup: float, split: int) -> None:
        self.process = process
        self.split = split
        """Number of steps in which one baseline batch is processed."""
        self.losses = [fmean(warm["losses"][i : i + split]) for i in range(0, len(warm["losses"]), split)]
        """The losses of the first baseline batches."""
        self.warm = warm
        self.startup = startup
        """Seconds from the start of the process to the end of its warm-up."""
        self.step_seconds = median(process.warmup_seconds[len(process.warmup_seconds) // 2 :])
        self.extra = max(sum(process.warmup_seconds) - len(process.warmup_seconds) * self.step_seconds, 0.0)
        """Duration of the warm-up minus the expected duration of its steps, in seconds."""
        self.untimed = 1 + int(warm["buffered"])  # exclude batches that were loaded while the process waited
        self.accumulate = int(warm["accumulate"])
        """Number of steps per update. All timed rounds contain the same fraction of updates."""
        self.seconds: list[float] = []
        self.peak_mib = float(warm["peak_mib"])

    def time(self, seconds: float, timeout: float) -> float:
        """Run steps for about `seconds` seconds, and return the mean step time in seconds."""
        steps = max(2, math.ceil(seconds / max(self.step_seconds, 1e-6)))
        steps = math.ceil(steps / self.accumulate) * self.accumulate
        timed = self.process.time(steps, self.untimed, timeout)
        self.seconds.append(timed["seconds"])
        self.step_seconds, self.peak_mib = self.seconds[-1], float(timed["peak_mib"])
        return self.step_seconds

    def round_seconds(self, seconds: float) -> float:
        """Return the expected duration of a round with `seconds` of timed steps."""
        timed_seconds = max(2 * self.step_seconds, seconds + self.accumulate * self.step_seconds)
        return timed_seconds + self.untimed * self.step_seconds


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
        self._make_job = make_job
        self._speed = speed
        self._names = names
        self._budget = budget
        self._round = min(budget / 300, _MAX_ROUND_SECONDS)  # seconds of timed steps per round
        self._report = report
        self._start = time.monotonic() if start is None else start
        self._max_end_seconds = 0.0
        self._plan_stack: ExitStack | None = None  # terminates the process that runs the current plan
        self._successful_labels: set[str] = set()
        self._auto: Mapping[str, int] = {}
        self._num_left = 0  # number of options that are not measured yet, including the current one
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
                self._run(stack)
            except KeyboardInterrupt:
                outcome.stopped = "interrupted"
        outcome.seconds = time.monotonic() - self._start
        return outcome

    def _run(self, stack: ExitStack) -> None:
        self._baseline = self._current = self._start_baseline(stack)
        warm = self._baseline.warm
        self._auto = warm["auto"]
        self._capabilities: Capabilities = warm["capabilities"]
        self.outcome.steps_per_epoch = warm["steps_per_epoch"]
        self.outcome.device = self._capabilities.device
        self._check_budget()
        try:
            batches = Batches(
                int(warm["num_workers"] or 0), warm["batch_size"], warm["shapes"], warm["counts_steps"]
            )
            options = list(candidates(self._names, self._capabilities, batches))
            for index, candidate in enumerate(options):
                self._num_left = len(options) - index
                self._add(self._try(candidate))
            self._measure_total()
        except _PlanFailedError as error:
            self.outcome.stopped = f"the process running the current plan exited: {error}"
        finally:
            self._summarize()

    @property
    def _remaining(self) -> float:
        """Seconds until the deadline, which is early enough to terminate the running processes within the budget."""
        margin = min(_MARGIN * self._budget, _MAX_MARGIN) + _MAX_PROCESSES * self._max_end_seconds
        return self._budget - margin - (time.monotonic() - self._start)

    @property
    def _rounds_seconds(self) -> float:
        """Expected duration of the minimum number of rounds."""
        return 2 * _MIN_ROUNDS * self._current.round_seconds(self._round)

    def _add(self, row: Row) -> None:
        self.outcome.rows.append(row)
        self._report(row)

    # ---- the baseline ------------------------------------------------------------------------------------------

    def _start_baseline(self, stack: ExitStack) -> _Running:
        try:
            running = self._launch(Setting(), stack, 0.0)
        except TrialError as failure:
            if failure.status != "timed out":
                raise SlipstreamError(
                    f"training the baseline failed ({failure.status}): {failure.reason}"
                ) from None
            raise self._budget_error(failure.warmup_seconds) from None
        if not all(map(math.isfinite, running.warm["losses"])):
            raise NonFiniteLossError(
                f"the losses of the baseline are not finite ({running.warm['losses']}); fix the training run first"
            )
        if running.warm["problem"]:
            raise SlipstreamError(
                f"the baseline's own options are not in effect: {running.warm['problem']}; fix the cause, or "
                "remove the options"
            )
        self.outcome.baseline_mib = running.peak_mib
        return running

    def _budget_error(self, seconds: Sequence[float]) -> ConfigError:
        """Return the error for a baseline that did not warm up within the budget."""
        step = median(seconds) if seconds else 0.0
        expected = 2 * (sum(seconds[:1]) + WARMUP * step) + 2 * _MIN_ROUNDS * 4 * step
        return budget_error(self._budget, "the baseline", len(seconds), WARMUP, expected)

    def _check_budget(self) -> None:
        needed = 2 * self._baseline.startup + self._rounds_seconds
        if needed > self._budget:
            raise ConfigError(
                f"{format_seconds(self._budget)} is too short for one trial; the estimated minimum is "
                f"{format_seconds(needed)}: two process startups of {format_seconds(self._baseline.startup)} each, "
                f"and {_MIN_ROUNDS} rounds at {format_seconds(self._baseline.step_seconds)} per step",
                "budget",
            )

    # ---- trials ------------------------------------------------------------------------------------------------

    def _launch(self, setting: Setting, stack: ExitStack, reserve: float) -> _Running:
        """Start a process and wait for the end of its warm-up, at most until `reserve` seconds before the deadline."""
        start_time = time.monotonic()
        setting = replace(setting, loader=self._auto, compile_cache=self._cache)
        observer = partial(Timer, warmup=WARMUP * setting.split)
        process = stack.enter_context(Process(self._make_job(setting), observer))
        stack.callback(self._end_process, process)  # runs before the `__exit__` of the process
        # On a busy machine, starting a process takes seconds, so the timeout is computed after the start.
        warm = process.wait_for("warm", max(self._remaining - reserve, 0.0))
        return _Running(process, warm, time.monotonic() - start_time, setting.split)

    def _end_process(self, process: Process) -> None:
        """Terminate a process, and store the longest time that termination has taken so far."""
        start_time = time.monotonic()
        process.end()
        self._max_end_seconds = max(self._max_end_seconds, time.monotonic() - start_time)

    def _try(self, candidate: Candidate) -> Row:
        plan = " + ".join(self.outcome.adopted) or "baseline"
        row = Row(candidate.label, "skipped", against=plan, setting=candidate.setting)
        if reason := self._skip_reason(candidate):
            return replace(row, reason=reason)
        # After the minimum number of rounds, leave this time for the final measurement of a plan with several options.
        reserve = self._rounds_seconds if self.outcome.adopted else 0.0
        expected = self._startup(candidate) + self._rounds_seconds
        if self._remaining < expected:
            return replace(
                row,
                status="not measured",
                reason=f"{format_seconds(max(self._remaining, 0))} of the budget is left, but this trial needs about "
                f"{format_seconds(expected)}",
            )
        with ExitStack() as stack:
            try:
                setting = self.outcome.setting.merge(candidate.setting)
                trial = self._launch(setting, stack, self._rounds_seconds)
                row = self._compare(candidate, trial, row, reserve)
            except TrialError as failure:
                return replace(row, status=failure.status, reason=failure.reason)
            if row.status == "adopted" and candidate.setting.processes > 1:
                return replace(row, status="faster", reason=_launch_hint(setting, self._speed))
            if row.status == "adopted":
                self._adopt(candidate, trial, row)
                self._keep(stack.pop_all())
        return row

    def _startup(self, candidate: Candidate) -> float:
        """Return the expected time until the end of the warm-up.

        If the candidate adds compilation, this includes the longest compilation time measured so far.
        """
        compiled = [row.compile_seconds or 0.0 for row in self.outcome.rows]
        own = "compile" in candidate.setting.speed and "compile" not in self.outcome.setting.speed
        return self._current.startup + (max(compiled, default=0.0) if own else 0.0)

    def _skip_reason(self, candidate: Candidate) -> str | None:
        own = self._baseline.warm["sources"].get(candidate.option)
        if own is not None:
            return f"already set by the run ({own})"
        if candidate.option in self._auto:
            return f"already measured by {candidate.option}=auto"
        if candidate.fallback_for in self._successful_labels:
            return f"not needed, because {candidate.fallback_for} works"
        if candidate.requires and candidate.requires not in self.outcome.setting.speed:
            return f"{candidate.requires} is not part of the plan"
        if candidate.problem:
            return candidate.problem
        if candidate.setting.processes > 1:
            return None  # the check uses the capabilities of a single process
        speed = merged_speed(self._speed, self.outcome.setting.merge(candidate.setting).speed)
        return unsupported_reason(candidate.setting, speed, self._capabilities)

    def _compare(self, candidate: Candidate, trial: _Running, row: Row, reserve: float) -> Row:
        if trial.warm["problem"]:
            return replace(row, status="failed", reason=trial.warm["problem"], peak_mib=trial.peak_mib)
        first, mean = difference(trial.losses, self._current.losses)
        combined = {**self._baseline.warm["sources"], **self.outcome.setting.speed}
        # Low precision amplifies the rounding differences caused by other options.
        allowed = LOW_PRECISION if "precision" in combined else candidate.tolerance
        row = replace(row, loss_difference=(first, mean), peak_mib=trial.peak_mib)
        if "compile" in self.outcome.setting.merge(candidate.setting).speed:
            row = replace(row, compile_seconds=max(trial.extra - self._baseline.extra, 0.0))
        if not (first <= allowed.first and mean <= allowed.mean):  # true for NaN
            return replace(
                row,
                status="rejected",
                reason=f"different losses: the first loss differs by {first:.2g} (allowed: {allowed.first:g}), and "
                f"the mean of {len(trial.losses)} losses by {mean:.2g} (allowed: {allowed.mean:g})",
            )
        self._successful_labels.add(candidate.label)
        seconds = max(_ROUNDS_FRACTION * self._budget, self._remaining / (self._num_left + 1))
        measured = self._alternate(self._current, trial, reserve, seconds)
        row = replace(row, estimate=measured, peak_mib=trial.peak_mib)
        if trial.seconds:
            row = replace(row, step_seconds=median(trial.seconds) * trial.split)
        return _with_status(row, measured)

    def _alternate(
        self, current: _Running, trial: _Running, reserve: float, seconds: float
    ) -> Estimate | None:
        """Return the ratio of the step times from alternating rounds, or None if there was no time for a round.

        After `seconds`, the measurement ends as soon as it has the minimum number of rounds.
        """
        ratios: list[float] = []
        end = time.monotonic() + seconds
        while len(ratios) < (_MAX_ROUNDS if time.monotonic() < end else _MIN_ROUNDS):
            expected = current.round_seconds(self._round) + trial.round_seconds(self._round)
            if self._remaining - (reserve if len(ratios) >= _MIN_ROUNDS else 0.0) < expected:
                break
            pair = (current, trial) if len(ratios) % 2 == 0 else (trial, current)
            times = {id(each): self._time(each, current) * each.split for each in pair}
            ratios.append(times[id(current)] / times[id(trial)])
            if _is_decided(ratios):
                break
        return estimate(ratios) if ratios else None

    def _time(self, running: _Running, current: _Running) -> float:
        try:
            return running.time(self._round, max(self._remaining, 0.1))
        except TrialError as failure:
            if running is current and failure.status == "timed out":
                raise TrialError("not measured", "the time budget ran out during a round") from None
            if running is current:
                raise _PlanFailedError(f"{failure.status}: {failure.reason}") from None
            raise

    def _adopt(self, candidate: Candidate, trial: _Running, row: Row) -> None:
        outcome = self.outcome
        outcome.setting = outcome.setting.merge(candidate.setting)
        outcome.adopted.append(candidate.label)
        product = row.estimate
        if outcome.total is not None and product is not None:
            total = outcome.total
            product = Estimate(
                total.ratio * product.ratio,
                total.low * product.low,
                total.high * product.high,
                product.rounds,
                min(total.confidence, product.confidence),
            )
        outcome.total, outcome.total_is_product = product, len(outcome.adopted) > 1
        outcome.compile_seconds = row.compile_seconds or 0.0
        if "compile" in outcome.setting.speed and "compile" not in candidate.setting.speed:
            # Part of the compiled code was in this search's cache, but a new run compiles everything.
            earlier = [each.compile_seconds or 0.0 for each in outcome.rows if each.status == "adopted"]
            outcome.compile_seconds = max([outcome.compile_seconds, *earlier])
        self._current = trial

    def _keep(self, stack: ExitStack) -> None:
        """Terminate the previous plan's process, unless it is that of the baseline, and keep the new process."""
        previous, self._plan_stack = self._plan_stack, stack
        self._exit.push(stack)
        if previous is not None:
            previous.close()

    def _measure_total(self) -> None:
        if self.outcome.total_is_product and self._current is not self._baseline:
            measured = self._alternate(self._baseline, self._current, 0.0, self._remaining)
            if measured is not None and measured.rounds >= _MIN_ROUNDS:
                self.outcome.total, self.outcome.total_is_product = measured, False
                if measured.ratio < 1:
                    self._withdraw(measured)

    def _withdraw(self, measured: Estimate) -> None:
        """Return to the baseline, because the options of the plan are not faster in combination."""
        outcome = self.outcome
        reason = (
            f"{' + '.join(outcome.adopted)} combined: {measured.ratio:.2f} times the speed of the baseline "
            f"({measured.low:.2f} to {measured.high:.2f} in {measured.rounds} rounds)"
        )
        outcome.rows = [
            replace(row, status="inconclusive", reason=reason) if row.status == "adopted" else row
            for row in outcome.rows
        ]
        outcome.setting, outcome.adopted, outcome.total, outcome.compile_seconds = Setting(), [], None, 0.0

    def _summarize(self) -> None:
        seconds = self._baseline.seconds or [self._baseline.step_seconds]
        self.outcome.baseline_seconds = median(seconds)
        if not self.outcome.stopped and any(map(_is_cut_off, self.outcome.rows)):
            self.outcome.stopped = "the time budget ran out"


class _PlanFailedError(Exception):
    """The process that runs the current plan has exited."""


def _launch_hint(setting: Setting, own: Any) -> str:
    """Return why a data-parallel trial is not adopted, and the command that trains with its changes and the plan's.

    The command does not use the file that contains the plan, because an option that is adopted after this trial, such
    as `accumulate`, can change the batch size.
    """
    # If `speed` is a string, an override cannot set its keys.
    overrides = ["'speed={_delete_: true, auto: true}'"] if own == "auto" else []
    overrides += [*_overrides("speed", setting.speed), *_overrides("train_dataloader", setting.dataloader)]
    return (
        f"not part of the plan, because it requires {setting.processes} processes; run: slipstream train ... "
        f"--nproc {setting.processes} {' '.join(overrides)}"
    )


def _overrides(key: str, value: Any) -> Iterator[str]:
    """Yield configuration overrides that set the values in nested dicts."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _overrides(f"{key}.{name}", item)
    else:
        yield f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def _is_cut_off(row: Row) -> bool:
    """Return whether a longer budget could change the row."""
    return row.status in ("not measured", "timed out") or "budget ran out" in row.reason


def _is_decided(ratios: Sequence[float]) -> bool:
    """Return whether the result is clear, in which case no more rounds are needed."""
    if len(ratios) >= 3 and max(ratios) < _EARLY_STOP_RATIO:
        return True
    if len(ratios) < _MIN_ROUNDS:
        return False
    result = estimate(ratios)
    return result.low > MIN_GAIN or result.high < 1 or result.width < 0.02


def _with_status(row: Row, measured: Estimate | None) -> Row:
    if measured is None:
        return replace(row, status="not measured", reason="the time budget ran out")
    if measured.rounds < _MIN_ROUNDS:
        if measured.high < _EARLY_STOP_RATIO:
            return replace(row, status="slower")
        return replace(
            row, status="inconclusive", reason=f"the time budget ran out after round {measured.rounds}"
        )
    if measured.low > 1 and measured.ratio >= MIN_GAIN:
        return replace(row, status="adopted")
    if measured.high < 1:
        return replace(row, status="slower")
    if measured.confidence >= _MIN_CONFIDENCE and measured.ratio >= MIN_GAIN:
        return replace(
            row,
            status="adopted",
            reason=f"probably faster: after {measured.rounds} rounds, the confidence interval still includes 1",
        )
    return replace(row, status="no gain" if measured.width < 0.05 else "inconclusive")
