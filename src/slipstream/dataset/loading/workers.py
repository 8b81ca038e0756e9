"""Choose `num_workers` and `prefetch_factor` for a data loader based on measurements."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset

from slipstream.cores import cores
from slipstream.dataset.loading.waiting import stop_workers
from slipstream.dist import get_local_size
from slipstream.errors import ConfigError
from slipstream.logging import print_log
from slipstream.typecheck import matches, short_repr

__all__ = ["check_workers", "end_workers", "loading_rates", "with_workers"]

_AUTO = "auto"
_TIME_LIMIT = 5.0
"""Number of seconds after which no new trial starts."""
_TRIAL_TIME = 0.5
"""Measurement time for each number of workers, in seconds."""
_TARGET_BATCH_TIME = 0.03
"""Approximate time to load a batch in a trial, in seconds. A trial may use smaller batches than the run."""
_TRIAL_BATCHES = 64
"""Number of the run's batches whose samples are used in the trials."""
_MAX_PREFETCH_FACTOR = 8
_MAX_VALUE = 1024
"""Largest valid `num_workers` and `prefetch_factor`; larger values are mistakes that would exhaust resources."""


def check_workers(options: Mapping[str, Any], name: str, streamed: bool) -> None:
    """Raise a `ConfigError` if `num_workers` or `prefetch_factor` is neither a valid number nor `auto`.

    With an iterable dataset (`streamed`), `auto` also raises the error.
    """
    for key, minimum in (("num_workers", 0), ("prefetch_factor", 1)):
        value = options.get(key)
        if isinstance(value, str) and value == _AUTO:
            if streamed:
                raise ConfigError(
                    f"'{_AUTO}' is not supported for iterable datasets; set a number", f"{name}.{key}"
                )
        elif value is not None and not (matches(value, int) and minimum <= value <= _MAX_VALUE):
            raise ConfigError(
                f"must be an integer from {minimum} to {_MAX_VALUE}, or '{_AUTO}', not {short_repr(value)}",
                f"{name}.{key}",
            )


def end_workers(loader: DataLoader[Any]) -> None:
    """Stop the persistent workers of a loader; the next epoch starts new workers.

    If workers are not stopped explicitly, the traceback of an error may keep them alive, or garbage collection may
    take five seconds per worker, because it closes their queues first.
    """
    if getattr(loader, "_iterator", None) is not None:
        stop_workers(loader._iterator)
        loader._iterator = None


def with_workers(
    options: Mapping[str, Any], dataset: Any, batches: Iterable[Sequence[Any]], name: str
) -> dict[str, Any]:
    """Return a loader's options with each `auto` replaced by a number, and log the measurements.

    The throughput is measured for 1, 2, 4, ... workers, up to the number of cores available to this process divided by
    the number of processes on the machine. The result is the smallest number of workers whose throughput is within 5%
    of the best. The result is 0 if the throughput without workers is more than 1.5 times the best throughput with
    workers, because most of the time is then spent transferring batches between processes. No new trial starts after
    five seconds; if the throughput is still increasing then, the result is twice the last number measured, up to the
    limit. Samples are read only in worker processes, so the generators and caches of this process do not change.

    Args:
        options: options of the `DataLoader`, with its `collate_fn`.
        dataset: the dataset of the loader.
        batches: lists of indices from the batch sampler.
        name: name of the loader in the log (such as `train_dataloader`).
    """
    chosen = dict(options)
    auto_workers = options.get("num_workers") == _AUTO
    auto_prefetch = options.get("prefetch_factor") == _AUTO and options.get("num_workers")
    if not auto_workers and not auto_prefetch:
        return chosen
    drawn = [list(batch) for batch in islice(batches, _TRIAL_BATCHES)]
    if not drawn:  # the sampler yields no batches; the run raises an error
        return {**chosen, "num_workers": 0}
    trials = _Trials(dataset, options, drawn)
    messages = [f"{name}: a batch takes {1e3 * trials.batch_seconds:.3g} ms in one process"]
    if auto_workers:
        limit = max(cores() // get_local_size(), 1)
        rates = trials.rates(limit)
        chosen["num_workers"] = _choose_num_workers(rates, limit)
        rates_text = ", ".join(f"{workers}: {rate:.3g}" for workers, rate in rates.items())
        messages.append(
            f"num_workers={chosen['num_workers']} (limit {limit}; samples/s by number of workers: {rates_text})"
        )
    if auto_prefetch and chosen["num_workers"]:
        max_batches = (
            _free_bytes() / 4 / get_local_size() / chosen["num_workers"] / max(trials.batch_bytes, 1)
        )
        ratio = trials.slowest_batch()
        chosen["prefetch_factor"] = _prefetch_factor(ratio, max_batches)
        messages.append(
            f"prefetch_factor={chosen['prefetch_factor']} (slow batches take {ratio:.2g} times the mean time)"
        )
    print_log("; ".join(messages), "current")
    return chosen


def loading_rates(loader: DataLoader[Any]) -> dict[int, float]:
    """Return a loader's throughput in samples/s for each number of workers, or an empty dict if it cannot be measured.

    The worker counts are those that `with_workers` measures, and the loader's `num_workers`. Randomly drawn samples
    are read in worker processes, so the generators, the sampler and the caches of this process do not change.
    """
    dataset: Any = loader.dataset
    size = getattr(getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler), "batch_size", None)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or size is None:
        return {}
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(dataset), (_TRIAL_BATCHES, size), generator=generator).tolist()
    options = {name: getattr(loader, name) for name in ("multiprocessing_context", "worker_init_fn")}
    trials = _Trials(dataset, {**options, "collate_fn": loader.collate_fn}, drawn)
    return trials.rates(max(cores() // get_local_size(), 1), loader.num_workers)


class _Trials:
    """Short throughput measurements of data loaders.

    Args:
        dataset: the dataset to read.
        options: options of the run's loader.
        batches: batches of indices from the run.
    """

    def __init__(self, dataset: Any, options: Mapping[str, Any], batches: Sequence[list[Any]]) -> None:
        self.dataset = dataset
        self.collate = options["collate_fn"]
        self.options = {
            k: v for k, v in options.items() if k in ("multiprocessing_context", "worker_init_fn")
        }
        self.size = len(batches[0])
        # All trials share one iterator, so that no trial reads files that an earlier trial has cached.
        self._indices = cycle(chain.from_iterable(batches))
        probes = self._probe(1)
        self.sample_seconds = [seconds for seconds, _ in probes]
        self.batch_seconds = self.size * float(np.mean(self.sample_seconds))
        self.batch_bytes = self.size * max(size for _, size in probes)
        if (
            self.batch_seconds < _TRIAL_TIME / 2
        ):  # loading a batch may be faster than loading its samples one by one
            self.batch_seconds = float(np.median([seconds for seconds, _ in self._probe(self.size)]))

    def rates(self, limit: int, required: int = 0) -> dict[int, float]:
        """Return the throughput in samples/s for each number of workers.

        The measurement stops when adding workers no longer helps or time runs out.

        Args:
            limit: the largest number of workers to try.
            required: a worker count that is always measured.
        """
        chunk = min(max(round(self.size * _TARGET_BATCH_TIME / self.batch_seconds), 1), self.size)
        rates = {0: self.size / self.batch_seconds}
        end, best = time.monotonic() + _TIME_LIMIT, 0.0
        for workers in _candidates(limit):
            rates[workers] = rate = self._throughput(workers, chunk)
            if rate < 1.05 * best or time.monotonic() > end:
                break
            best = rate
        if required not in rates:
            rates[required] = self._throughput(required, chunk)
        return rates

    def slowest_batch(self) -> float:
        """Return the time of a batch that contains the slowest sample measured, relative to the mean batch time."""
        mean = float(np.mean(self.sample_seconds))
        return (mean * (self.size - 1) + max(self.sample_seconds)) / (mean * self.size)

    def _throughput(self, workers: int, chunk: int) -> float:
        batches = self._loader(self.dataset, self.collate, workers, chunk)
        for _ in range(workers):  # wait until all workers have started
            next(batches)
        start, count, seconds = time.perf_counter(), 0, 0.0
        while seconds < _TRIAL_TIME or (count < 2 * workers and seconds < 4 * _TRIAL_TIME):
            next(batches)
            count, seconds = count + 1, time.perf_counter() - start
        return count * chunk / seconds

    def _probe(self, size: int) -> list[tuple[float, int]]:
        """Read several batches of `size` samples in one worker, and return (seconds, bytes) for each batch."""
        batches = self._loader(_Probe(self.dataset, self.collate), _identity, 1, size)
        next(batches)  # not measured, because its time includes imports and opening files
        measurements, end = [next(batches), next(batches)], time.monotonic() + _TRIAL_TIME
        while time.monotonic() < end:
            measurements.append(next(batches))
        return measurements

    def _loader(self, dataset: Any, collate: Any, workers: int, size: int) -> Iterator[Any]:
        sampler = (list(islice(self._indices, size)) for _ in iter(int, 1))
        generator = torch.Generator()  # otherwise the workers' seeds would be drawn from the global generator
        settings = {"num_workers": workers, "collate_fn": collate, "generator": generator}
        batches: Any = iter(DataLoader(dataset, batch_sampler=sampler, **settings, **self.options))
        try:
            yield from batches
        finally:  # otherwise an error's traceback would keep the workers alive, and stopping them would take 5 s
            batches._shutdown_workers()


class _Probe(Dataset[Any]):
    """Dataset wrapper that returns (seconds, bytes) for each batch, measured in the worker that reads the batch."""

    def __init__(self, dataset: Any, collate: Any) -> None:
        self.dataset = dataset
        self.collate = collate

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # unpickling accesses `dataset` before it is set
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitems__(self, indices: list[Any]) -> tuple[float, int]:
        start = time.perf_counter()
        get_batch = getattr(self.dataset, "__getitems__", None)
        batch = self.collate(get_batch(indices) if get_batch else [self.dataset[index] for index in indices])
        seconds = time.perf_counter() - start
        return seconds, sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def _candidates(limit: int) -> list[int]:
    """Return 1, 2, 4, ... up to the limit, and the limit itself."""
    return sorted({*(2**power for power in range(limit.bit_length())), limit})


def _choose_num_workers(rates: Mapping[int, float], limit: int) -> int:
    """Return the number of workers to use, given the samples/s measured for each number."""
    measured = {workers: rate for workers, rate in rates.items() if workers}
    best, last = max(measured.values()), max(measured)
    # Without workers, each step waits for its data, so 0 is chosen only if loading is then much faster.
    if rates[0] > 1.5 * best:
        return 0
    # Each doubling still increased the throughput when the time limit was reached.
    if last < limit and all(measured[last] >= 1.05 * measured[n] for n in measured if n != last):
        return min(2 * last, limit)
    return min(workers for workers, rate in measured.items() if rate >= 0.95 * best)


def _prefetch_factor(ratio: float, max_batches: float) -> int:
    """Return a prefetch factor that keeps enough batches ready while a worker loads a slow batch.

    The result is at most `max_batches`, but at least 1.
    """
    return max(min(1 + math.ceil(ratio), _MAX_PREFETCH_FACTOR, int(max_batches)), 1)


def _free_bytes() -> int:
    """Return the number of bytes available for batches: the smaller of available memory and free shared memory."""
    free = [2**62]
    if (memory := Path("/proc/meminfo")).is_file():
        lines = memory.read_text().splitlines()
        free += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    if (shared := Path("/dev/shm")).is_dir():
        free.append(shutil.disk_usage(shared).free)
    return min(free)


def _identity(batch: Any) -> Any:
    return batch
