"""Find the largest batch size that fits in memory, and the fastest batch size."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from slipstream.cgroups import available_memory
from slipstream.dist import all_gather_object, get_world_size
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.tables import make_table, table_text
from slipstream.tune.jobs import Setting
from slipstream.tune.observer import Timer
from slipstream.tune.process import Job, Process, TrialError, format_seconds
from slipstream.typecheck import PositiveInt, check

_WARMUP, _TIMED = 3, 3
# Maximum fraction of the available CPU memory that a trial may use.
_MAX_MEMORY_FRACTION = 0.9


@dataclass(frozen=True)
class BatchSizeRow:
    """The measurement of one batch size."""

    batch_size: int
    """Number of samples per batch of each process."""
    status: str
    """`fits`, `out of memory`, `failed` or `too large` (not tried)."""
    samples_per_second: float | None = None
    """The samples of all processes divided by the time of the slowest process."""
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
        fitting = [row for row in self.rows if row.status == "fits"]
        return max(fitting, key=lambda row: row.samples_per_second or 0.0).batch_size

    def __str__(self) -> str:
        cells = [
            (
                str(row.batch_size),
                "" if row.samples_per_second is None else f"{row.samples_per_second:.4g}",
                "" if row.peak_mib is None else f"{row.peak_mib:.0f}",
                f"{row.status}: {row.reason}" if row.reason else row.status,
            )
            for row in sorted(self.rows, key=lambda row: row.batch_size)
        ]
        table = table_text(make_table(("batch size", "samples/s", "peak MiB", "status"), cells))
        note = f"The search is not complete: {self.stopped}.\n" if self.stopped else ""
        tried = (
            " (the largest size tried)" if self.largest == max(row.batch_size for row in self.rows) else ""
        )
        return f"{table}{note}Largest that fits: {self.largest}{tried}; fastest: {self.fastest}."


def search_batch_sizes(
    make_job: Callable[[Setting], Job],
    max_batch_size: int,
    budget: float,
    report: Callable[[BatchSizeRow], None],
    start_time: float | None = None,
) -> BatchSizes:
    """Try 1, 2, 4, ... up to `max_batch_size`, then sizes between the largest that fits and the smallest that does not.

    Each size runs in its own process. On a CPU, a size is not tried if it is expected to require more than
    90% of the available memory.

    If a process group exists, all of its ranks must call this function with the same arguments. They try the same sizes
    together, with data-parallel training, and return the same result. A size that fails on any rank is considered not
    to fit.

    Args:
        make_job: a function that returns the run for a setting.
        max_batch_size: largest batch size to try.
        budget: time limit in seconds.
        report: called with each new row.
        start_time: the time at which the budget starts, as returned by `time.monotonic()`; None means now.

    Raises:
        ConfigError: the budget is too short for the first batch size.
        SlipstreamError: training failed with every batch size.
    """
    check(max_batch_size, PositiveInt, "max_batch_size")
    end = (time.monotonic() if start_time is None else start_time) + budget
    search = _Search(make_job, max_batch_size, end, report)
    stopped = ""
    try:
        search.run()
    except TimeoutError as error:
        if not search.fits:
            raise ConfigError(f"{format_seconds(budget)} is too short: {error}", "budget") from None
        stopped = "the time budget ran out"
    except KeyboardInterrupt:
        if not search.fits or get_world_size() > 1:  # other ranks may have measured other sizes by now
            raise
        stopped = "interrupted"
    if not search.fits:
        last = search.rows[-1]
        raise SlipstreamError(
            f"training failed with every batch size (batch size {last.batch_size}: {last.status}: {last.reason})"
        )
    return BatchSizes(search.rows, stopped)


class _Search:
    def __init__(
        self,
        make_job: Callable[[Setting], Job],
        max_batch_size: int,
        end: float,
        report: Callable[[BatchSizeRow], None],
    ) -> None:
        self._make_job, self._max, self._end, self._report = make_job, max_batch_size, end, report
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
                # At the limit, a larger number ends the search.
                fits, size = size, self._max + 1 if size == self._max else min(2 * size, self._max)
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

    def _measure(self, size: int) -> str:
        row = self._too_large(size) or self._trial(size)
        self.rows.append(row)
        self._report(row)
        return row.status

    def _too_large(self, size: int) -> BatchSizeRow | None:
        """Return a `too large` row if the CPU memory, extrapolated from two sizes that fit, exceeds the limit."""
        fitting = [row for row in self.rows if row.status == "fits"]
        known = sorted((row.batch_size, row.peak_mib or 0.0) for row in fitting)
        if self._available is None or len(known) < 2:
            return None
        (small, small_mib), (large, large_mib) = known[-2:]
        expected = large_mib + max(large_mib - small_mib, 0.0) * (size - large) / (large - small)
        # The memory usage of the smallest trial approximates that of a process without a batch.
        if expected - known[0][1] <= _MAX_MEMORY_FRACTION * self._available:
            return None
        reason = f"needs about {expected:.0f} MiB; {self._available:.0f} MiB is available"
        return BatchSizeRow(size, "too large", reason=reason)

    def _trial(self, size: int) -> BatchSizeRow:
        remaining = min(all_gather_object(self._end - time.monotonic()))
        if remaining <= 0:
            raise TimeoutError(f"no time is left for batch size {size}")
        try:
            observer = partial(Timer, warmup=_WARMUP)
            with Process(self._make_job(Setting(batch_size=size)), observer) as process:
                warm = process.wait_for("warm", remaining)
                steps = math.ceil(_TIMED / warm["accumulate"]) * warm["accumulate"]
                timed = process.time(steps, 1 + warm["buffered"], max(self._end - time.monotonic(), 0.1))
        except TrialError as failure:
            if failure.status == "timed out":
                raise TimeoutError(f"batch size {size}: {failure.reason}") from None
            return BatchSizeRow(size, failure.status, reason=failure.reason)
        rate = get_world_size() * size / timed["seconds"]
        return BatchSizeRow(size, "fits", rate, timed["peak_mib"])


def _available_mib_per_rank() -> float | None:
    """Return the available CPU memory per rank in MiB, on the machine where it is smallest; see `available_mib`."""
    machines = all_gather_object((platform.node(), available_mib()))
    names = [name for name, _ in machines]
    return min((mib / names.count(name) for name, mib in machines if mib is not None), default=None)


def available_mib() -> float | None:
    """Return the available CPU memory in MiB; None if it is unknown, or if the machine has an accelerator."""
    meminfo = Path("/proc/meminfo")
    if torch.accelerator.is_available() or not meminfo.is_file():
        return None
    lines = meminfo.read_text(encoding="utf-8").splitlines()
    free = next(int(line.split()[1]) / 1024 for line in lines if line.startswith("MemAvailable:"))
    limited = available_memory()
    return free if limited is None else min(free, limited / 2**20)
