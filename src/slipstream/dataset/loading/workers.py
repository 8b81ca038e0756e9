"""How many processes load the data, and how far ahead: `num_workers` and `prefetch_factor` by measuring."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, cycle, islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from slipstream.cores import cores
from slipstream.dist import get_local_size
from slipstream.errors import ConfigError
from slipstream.logging import print_log

__all__ = ["check_workers", "end_workers", "with_workers"]

_AUTO = "auto"
_SECONDS = 5.0
"""After which no further number of workers is tried."""
_WINDOW = 0.5
"""Seconds for which each is watched."""
_CHUNK = 0.03
"""Seconds of work in a batch of a trial, about: it need not be as large as the run's."""
_DRAWN = 64
"""Batches of the run from which the trials take their samples."""
_DEEPEST = 8


def check_workers(options: Mapping[str, Any], name: str, streamed: bool) -> None:
    """Raise a `ConfigError` if `num_workers` or `prefetch_factor` is neither a number that can be meant nor `auto`."""
    for key, least in (("num_workers", 0), ("prefetch_factor", 1)):
        value = options.get(key)
        if value == _AUTO:
            if streamed:
                raise ConfigError("an iterable data set cannot be tried out: give a number", f"{name}.{key}")
        elif value is not None and not (isinstance(value, int) and value >= least):
            raise ConfigError(
                f"must be a whole number of at least {least} or '{_AUTO}', not {value!r}", f"{name}.{key}"
            )


def end_workers(loader: DataLoader[Any]) -> None:
    """End the processes that a loader keeps for its next epoch; that starts new ones.

    Left to the garbage collector, which closes their queues before they are told, each would take five seconds.
    """
    if getattr(loader, "_iterator", None) is not None:
        loader._iterator = None


def with_workers(
    options: Mapping[str, Any], dataset: Any, batches: Iterable[Sequence[Any]], name: str
) -> dict[str, Any]:
    """Return a loader's options with numbers where they say `auto`, and log what was measured.

    One, two, four, ... workers are watched while they deliver as fast as they can, up to the cores of this process
    (of its share, if there are several on the machine), and the fewest within 5 % of the best are taken; none, where
    this process alone is half as fast again, since then handing batches over is most of the work. After five seconds
    no further trial begins. Samples are read in worker processes only: no generator and no cache of this one moves.

    Args:
        options: of the `DataLoader`, with its `collate_fn`.
        dataset: what it will read.
        batches: lists of indices as its batch sampler gives them.
        name: what the log calls it (`train_dataloader`).
    """
    chosen = dict(options)
    counting = options.get("num_workers") == _AUTO
    deepening = options.get("prefetch_factor") == _AUTO and options.get("num_workers")
    if not counting and not deepening:
        return chosen
    drawn = [list(batch) for batch in islice(batches, _DRAWN)]
    if not drawn:  # the run will say so
        return {**chosen, "num_workers": 0}
    trials = _Trials(dataset, options, drawn)
    said = [f"{name}: a batch takes {1e3 * trials.batch_seconds:.3g} ms in one process"]
    if counting:
        limit = max(cores() // get_local_size(), 1)
        rates = trials.rates(limit)
        chosen["num_workers"] = _fewest(rates, limit)
        shown = ", ".join(f"{workers}: {rate:.3g}" for workers, rate in rates.items())
        said.append(f"num_workers={chosen['num_workers']} of at most {limit} (samples/s: {shown})")
    if deepening and chosen["num_workers"]:
        room = _free_bytes() / 4 / get_local_size() / chosen["num_workers"] / max(trials.batch_bytes, 1)
        ratio = trials.slowest_batch()
        chosen["prefetch_factor"] = _depth(ratio, room)
        said.append(
            f"prefetch_factor={chosen['prefetch_factor']} (slow batches take {ratio:.2g} times the mean)"
        )
    print_log("; ".join(said), "current")
    return chosen


class _Trials:
    """Loaders of the run's samples, watched for a short time.

    Args:
        dataset: what is read.
        options: of the run's loader.
        batches: of the run.
    """

    def __init__(self, dataset: Any, options: Mapping[str, Any], batches: Sequence[list[Any]]) -> None:
        self.dataset = dataset
        self.collate = options["collate_fn"]
        self.options = {
            k: v for k, v in options.items() if k in ("multiprocessing_context", "worker_init_fn")
        }
        self.size = len(batches[0])
        # One stream for all trials: the next one does not find its files in memory because of the last.
        self._indices = cycle(chain.from_iterable(batches))
        probes = self._probed(1)
        self.sample_seconds = [seconds for seconds, _ in probes]
        self.batch_seconds = self.size * fmean(self.sample_seconds)
        self.batch_bytes = self.size * max(size for _, size in probes)
        if self.batch_seconds < _WINDOW / 2:  # many data sets make a batch in less time than its samples
            self.batch_seconds = median(seconds for seconds, _ in self._probed(self.size))

    def rates(self, limit: int) -> dict[int, float]:
        """Return the samples/s by number of workers, until more of them no longer help, or the time is over."""
        chunk = min(max(round(self.size * _CHUNK / self.batch_seconds), 1), self.size)
        found = {0: self.size / self.batch_seconds}
        end, best = time.monotonic() + _SECONDS, 0.0
        for workers in _numbers(limit):
            found[workers] = rate = self._delivered(workers, chunk)
            if rate < 1.05 * best or time.monotonic() > end:
                break
            best = rate
        return found

    def slowest_batch(self) -> float:
        """Return how many times the mean a batch takes with the slowest sample that was seen among its own."""
        mean = fmean(self.sample_seconds)
        return (mean * (self.size - 1) + max(self.sample_seconds)) / (mean * self.size)

    def _delivered(self, workers: int, chunk: int) -> float:
        batches = self._loader(self.dataset, self.collate, workers, chunk)
        for _ in range(workers):  # until all have started
            next(batches)
        start, count, seconds = time.perf_counter(), 0, 0.0
        while seconds < _WINDOW or (count < 2 * workers and seconds < 4 * _WINDOW):
            next(batches)
            count, seconds = count + 1, time.perf_counter() - start
        return count * chunk / seconds

    def _probed(self, size: int) -> list[tuple[float, int]]:
        """Return the seconds and the bytes of batches of `size` samples, of one worker."""
        batches = self._loader(_Probe(self.dataset, self.collate), _as_it_is, 1, size)
        next(batches)  # imports, open files
        found, end = [next(batches), next(batches)], time.monotonic() + _WINDOW
        while time.monotonic() < end:
            found.append(next(batches))
        return found

    def _loader(self, dataset: Any, collate: Any, workers: int, size: int) -> Iterator[Any]:
        sampler = (list(islice(self._indices, size)) for _ in iter(int, 1))
        generator = torch.Generator()  # else the workers' seeds would be drawn from the run's
        own = {"num_workers": workers, "collate_fn": collate, "generator": generator}
        batches: Any = iter(DataLoader(dataset, batch_sampler=sampler, **own, **self.options))
        try:
            yield from batches
        finally:  # the traceback of a sample's error would keep them, and their end would take five seconds
            batches._shutdown_workers()


class _Probe(Dataset[Any]):
    """A data set whose batches are (seconds, bytes) of another's, made where that is read."""

    def __init__(self, dataset: Any, collate: Any) -> None:
        self.dataset = dataset
        self.collate = collate

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # asked while unpickling, before it is set
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitems__(self, indices: list[Any]) -> tuple[float, int]:
        start = time.perf_counter()
        whole = getattr(self.dataset, "__getitems__", None)
        batch = self.collate(whole(indices) if whole else [self.dataset[index] for index in indices])
        seconds = time.perf_counter() - start
        return seconds, sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def _numbers(limit: int) -> list[int]:
    """Return 1, 2, 4, ... up to the limit, and the limit."""
    return sorted({*(2**power for power in range(limit.bit_length())), limit})


def _fewest(rates: Mapping[int, float], limit: int) -> int:
    """Return the number of workers to take, from the samples/s of each."""
    own = {workers: rate for workers, rate in rates.items() if workers}
    best, last = max(own.values()), max(own)
    # What this process loads, the step waits for: only a hand-over that costs half of the work is worse.
    if rates[0] > 1.5 * best:
        return 0
    # The time was over while each doubling still helped.
    if last < limit and all(own[last] >= 1.05 * own[n] for n in own if n != last):
        return min(2 * last, limit)
    return min(workers for workers, rate in own.items() if rate >= 0.95 * best)


def _depth(ratio: float, room: float) -> int:
    """Return how many batches each worker prepares: while a slow one is made, the others' last; as memory allows."""
    return max(min(1 + math.ceil(ratio), _DEEPEST, int(room)), 1)


def _free_bytes() -> int:
    """Return the bytes that batches on their way may fill: of memory, and of what processes share."""
    free = [2**62]
    if (memory := Path("/proc/meminfo")).is_file():
        lines = memory.read_text().splitlines()
        free += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    if (shared := Path("/dev/shm")).is_dir():
        free.append(shutil.disk_usage(shared).free)
    return min(free)


def _as_it_is(batch: Any) -> Any:
    return batch
