"""Find the largest batch size that fits in memory, and the fastest batch size."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slipstream.cgroups import available_memory
from slipstream.dist import all_gather_object, get_world_size
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.tables import make_table, table_text
from slipstream.tune.jobs import Setting
from slipstream.tune.observer import Timer
from slipstream.tune.process import Job, Process, TrialError, budget_error, incomplete_note
from slipstream.tune.rank_process import RankProcess, check_same_on_all_ranks

__all__ = ["BatchSizeRow", "BatchSizes", "available_mib", "search_batch_sizes"]

_WARMUP, _TIMED = 3, 3
_STEPS = _WARMUP + 1 + _TIMED
"""Minimum number of steps in a trial, including one untimed step after the warm-up."""
_MAX_MEMORY_FRACTION = 0.9
"""Maximum fraction of the available CPU memory that a trial may use."""


@dataclass(frozen=True)
class BatchSizeRow:
    """The measurement of one batch size."""

    batch_size: int
    """Number of samples per batch of each process."""
    status: str
    """`fits`, `out of memory`, `failed` or `too large` (not tried)."""
    samples_per_second: float | None = None
    """Total throughput in samples per second: the samples of all processes divided by the time of the slowest
    process."""
    peak_mib: float | None = None
    """Peak memory in MiB, the largest value across all processes."""
    reason: str = ""


@dataclass(frozen=True)
class BatchSizes:
    """The measured batch sizes."""

    rows: list[BatchSizeRow]
    stopped: str = ""
    """Why the search ended before the limit was found; empty if the limit was found."""

    @property
    def largest(self) -> int:
        """The largest batch size that fits."""
        return max(row.batch_size for row in self.rows if row.status == "fits")

    @property
    def fastest(self) -> int:
        """The batch size with the highest throughput in samples per second."""
        return max(
            (row for row in self.rows if row.status == "fits"), key=lambda row: row.samples_per_second or 0.0
        ).batch_size

    def __str__(self) -> str:
        table = make_table(("batch size", "samples/s", "peak MiB", "status"), self._cells())
        note = f"{incomplete_note('search', self.stopped)}\n" if self.stopped else ""
        largest_tried = max(row.batch_size for row in self.rows)
        tried = " (the largest size tried)" if self.largest == largest_tried else ""
        return f"{table_text(table)}{note}Largest that fits: {self.largest}{tried}; fastest: {self.fastest}."

    def _cells(self) -> Iterator[tuple[str, str, str, str]]:
        for row in sorted(self.rows, key=lambda row: row.batch_size):
            rate = "" if row.samples_per_second is None else f"{row.samples_per_second:.4g}"
            peak = "" if row.peak_mib is None else f"{row.peak_mib:.0f}"
            yield str(row.batch_size), rate, peak, f"{row.status}: {row.reason}" if row.reason else row.status


def search_batch_sizes(
    make_job: Callable[[Setting], Job],
    max_size: int,
    budget: float,
    report: Callable[[BatchSizeRow], None],
    start_time: float | None = None,
) -> BatchSizes:
    """Try 1, 2, 4, ... up to `max_size`, then sizes between the largest that fits and the smallest that does not fit.

    Each size runs in its own process. On a CPU, a size is not tried if it is expected to require more than
    90% of the available memory.

    If a process group exists, all of its ranks must call this function. They try the same sizes together, with
    data-parallel training (see `RankProcess`), and return the same result. A size that fails on any rank is considered
    not to fit.

    Args:
        make_job: a function that returns the run for a setting.
        max_size: largest batch size to try.
        budget: time limit in seconds.
        report: called with each new row.
        start_time: the time at which the budget starts, as returned by `time.monotonic()`; None means now.

    Raises:
        ConfigError: the budget is too short for the first batch size, or the ranks have different limits.
        SlipstreamError: training failed with every batch size.
    """
    check_same_on_all_ranks(max_size=max_size, budget=budget)
    start_time = time.monotonic() if start_time is None else start_time
    search = _Search(make_job, max_size, start_time + budget, report)
    stopped = ""
    try:
        search.run()
    except _OutOfTimeError as error:
        if not search.fits:
            name = f"training with batch size {error.size}"
            raise budget_error(budget, name, error.finished, _STEPS) from None
        stopped = "the time budget ran out"
    except KeyboardInterrupt:
        if not search.fits or get_world_size() > 1:  # other ranks may have measured other sizes by now
            raise
        stopped = "interrupted"
    if not search.fits:
        last = search.rows[-1]
        raise SlipstreamError(
            "training failed with every batch size that was tried "
            f"(batch size {last.batch_size}: {last.status}: {last.reason}); fix the cause"
        )
    return BatchSizes(search.rows, stopped)


class _OutOfTimeError(Exception):
    """The time budget ran out during the trial of batch size `size`, after `finished` steps."""

    def __init__(self, size: int, finished: int = 0) -> None:
        super().__init__(size, finished)
        self.size, self.finished = size, finished


class _Search:
    def __init__(
        self,
        make_job: Callable[[Setting], Job],
        max_size: int,
        end: float,
        report: Callable[[BatchSizeRow], None],
    ) -> None:
        if max_size < 1:
            raise ConfigError(f"must be at least 1, not {max_size}", "max_size")
        self._make_job, self._max, self._end, self._report = make_job, max_size, end, report
        self._available = _available_mib_per_rank()
        self.rows: list[BatchSizeRow] = []

    @property
    def fits(self) -> bool:
        """Whether any size tried so far fits."""
        return any(row.status == "fits" for row in self.rows)

    def run(self) -> None:
        fits, fails, size = 0, 0, 1
        while not fails and size <= self._max:
            status = self._measure(size)
            if status == "fits":
                fits, size = size, self._next(size)
            elif status == "failed" and size == 1 and self._max > 1:
                size = 2  # BatchNorm cannot train with a single value per channel
            else:
                fails = size
        while fits and fails - fits > max(fits // 8, 1):
            middle = (fits + fails) // 2
            if self._measure(middle) == "fits":
                fits = middle
            else:
                fails = middle

    def _next(self, size: int) -> int:
        """Return twice the size, but at most the limit. At the limit, return a larger number to end the search."""
        return self._max + 1 if size == self._max else min(2 * size, self._max)

    def _measure(self, size: int) -> str:
        row = self._too_large(size) or self._trial(size)
        self.rows.append(row)
        self._report(row)
        return row.status

    def _too_large(self, size: int) -> BatchSizeRow | None:
        """Return a `too large` row if the CPU memory, extrapolated from two sizes that fit, exceeds the limit."""
        known = sorted(
            (row.batch_size, row.peak_mib)
            for row in self.rows
            if row.status == "fits" and row.peak_mib is not None
        )
        if self._available is None or len(known) < 2:
            return None
        (small, small_mib), (large, large_mib) = known[-2:]
        expected = large_mib + max(large_mib - small_mib, 0.0) * (size - large) / (large - small)
        # The memory usage of the smallest trial approximates that of a process without a batch.
        needed = expected - known[0][1]
        if needed <= _MAX_MEMORY_FRACTION * self._available:
            return None
        reason = f"needs about {expected:.0f} MiB; {self._available:.0f} MiB is available"
        return BatchSizeRow(size, "too large", reason=reason)

    def _trial(self, size: int) -> BatchSizeRow:
        job = self._make_job(Setting(batch_size=size))
        remaining = min(all_gather_object(self._end - time.monotonic()))
        if remaining <= 0:
            raise _OutOfTimeError(size)
        world_size = get_world_size()
        start = Process if world_size == 1 else RankProcess
        try:
            with start(job, partial(Timer, warmup=_WARMUP)) as process:
                warm = process.wait_for("warm", remaining)
                steps = math.ceil(_TIMED / warm["accumulate"]) * warm["accumulate"]
                timed = process.time(steps, 1 + warm["buffered"], max(self._end - time.monotonic(), 0.1))
        except TrialError as failure:
            if failure.status == "timed out":
                raise _OutOfTimeError(size, len(failure.warmup_seconds)) from None
            return BatchSizeRow(size, failure.status, reason=failure.reason)
        return BatchSizeRow(size, "fits", world_size * size / timed["seconds"], timed["peak_mib"])


def _available_mib_per_rank() -> float | None:
    """Return the available CPU memory per rank in MiB, on the machine where it is smallest; see `available_mib`."""
    machines = all_gather_object((platform.node(), available_mib()))
    names = [name for name, _ in machines]
    shares = [mib / names.count(name) for name, mib in machines if mib is not None]
    return min(shares, default=None)


def available_mib() -> float | None:
    """Return the available CPU memory in MiB; None if it is unknown, or if the machine has an accelerator."""
    import torch

    if torch.accelerator.is_available():
        return None
    limited = available_memory()
    limits = [_meminfo(), None if limited is None else limited / 2**20]
    return min((value for value in limits if value is not None), default=None)


def _meminfo() -> float | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("MemAvailable:")), None)
