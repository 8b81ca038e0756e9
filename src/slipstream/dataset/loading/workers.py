"""Worker processes of data loaders: their seeds, signals and errors."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import parent_process, resource_tracker
from multiprocessing.queues import Queue
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from slipstream.dataset.loading.generators import hash_numbers, seed_objects
from slipstream.dataset.loading.reachable import find_generators, reachable
from slipstream.dataset.loading.samples import DatasetReader
from slipstream.dist import get_rank
from slipstream.errors import DataLoaderError

_IGNORED_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
]
# Interval in seconds at which a worker checks whether the training process is alive.
_POLL_INTERVAL = 1.0
_SHARED_MEMORY = (
    "the worker processes have no shared memory left for their batches; increase the size of /dev/shm (docker run "
    "--shm-size=8g, or --ipc=host), lower num_workers, prefetch_factor or batch_size, or set num_workers=0"
)
_DEAD_WORKER = r"DataLoader worker \(pid\(?s?\)? ([\d, ]+)\) (is killed by signal: \w+|exited unexpectedly)"
# Maps the pattern of a torch message about worker processes to the cause and a remedy.
_REMEDIES = {
    r"DataLoader timed out after \S+ seconds": (
        "a worker process is slow or has hung; set num_workers=0 to find the slow sample, or increase the timeout"
    ),
    r"dataloader's workers are out of shared memory|unable to [^\n]*</torch_": _SHARED_MEMORY,
    r"Communication with the workers is no longer possible|received \d+ items of ancdata": (
        "the worker processes have too many open files; raise the limit (ulimit -n 65536), or call "
        "torch.multiprocessing.set_sharing_strategy('file_system')"
    ),
    _DEAD_WORKER: (
        "a worker process died: it may have printed an error, or the system or /dev/shm may have run out of memory. "
        "Lower num_workers, or set num_workers=0 to see the error in the training process"
    ),
}


@dataclass(frozen=True)
class WorkerInit:
    """A `worker_init_fn` that prepares the worker and calls the user's function.

    - SIGINT, SIGHUP, SIGUSR1, SIGUSR2 and SIGTERM are ignored, except SIGTERM from the training process. Terminals,
      Slurm and torchrun also send signals to the workers, but the training process still needs its workers until it
      has saved a checkpoint after the current step.
    - The worker exits when the training process dies. torch's workers check only between batches whether the training
      process is alive, so they do not exit if loading a sample hangs.
    - The worker exits if it cannot send a batch, for example because shared memory is full or the batch cannot be
      pickled. torch's workers would lose the batch, and the run would wait for the batch forever.
    - `get_worker_info().dataset` is the user's dataset.

    Args:
        user_init: the user's `worker_init_fn`, or None.
        owner: id of the process that creates the workers.
    """

    user_init: Callable[[int], None] | None = None
    owner: int = field(default_factory=os.getpid)

    def __call__(self, worker_id: int) -> None:
        """Prepare this worker process."""
        info = get_worker_info()
        while info is not None and isinstance(info.dataset, DatasetReader):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # the class is frozen
        if os.getpid() != self.owner:  # a worker may also be a thread of the owner
            self._prepare()
            if info is not None:  # map-style datasets are seeded again for each batch
                seed_objects(find_generators(info.dataset), (info.seed,))
        if self.user_init is not None:
            self.user_init(worker_id)

    def _prepare(self) -> None:
        for number in _IGNORED_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if hasattr(signal, "sigtimedwait"):
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED_SIGNALS)  # blocked by `_signals_blocked`
        threading.Thread(target=_end_with_parent, daemon=True).start()
        Queue._on_queue_feeder_error = staticmethod(_end_worker)  # type: ignore[attr-defined]


@contextmanager
def prepared_workers(loader: Any) -> Iterator[None]:
    """Let a `WorkerInit` prepare the workers that the user's loader starts in this context."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        yield
        return
    user_init = loader.worker_init_fn
    loader.worker_init_fn = user_init if isinstance(user_init, WorkerInit) else WorkerInit(user_init)
    try:
        with _signals_blocked(loader):
            yield
    finally:
        loader.worker_init_fn = user_init


@contextmanager
def _signals_blocked(loader: DataLoader[Any]) -> Iterator[None]:
    """Block signals in this thread while the workers of `loader` start.

    New processes inherit the blocked signals. Without this context, a signal that arrives before `WorkerInit` has run,
    such as SIGTERM from Slurm, would terminate the worker and therefore the run.
    """
    context: Any = loader.multiprocessing_context or multiprocessing
    method = context.get_start_method() if loader.num_workers else None
    unblocks = isinstance(loader.worker_init_fn, WorkerInit) and hasattr(signal, "sigtimedwait")
    # A forkserver would keep the signals blocked.
    if not unblocks or method in (None, "forkserver"):
        yield
        return
    if method == "spawn":
        resource_tracker.ensure_running()  # if it started later, it would unblock SIGINT and SIGTERM
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, [*_IGNORED_SIGNALS, signal.SIGTERM])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _end_with_parent() -> None:
    """Exit when the parent process dies or sends SIGTERM, which is how torch stops a worker."""
    parent = parent_process()
    if parent is None:
        return
    forked = os.getppid() == parent.pid  # otherwise, this process is a child of the forkserver
    while os.getppid() == parent.pid if forked else parent.is_alive():
        if not hasattr(signal, "sigtimedwait"):
            time.sleep(_POLL_INTERVAL)
        elif (info := signal.sigtimedwait((signal.SIGTERM,), _POLL_INTERVAL)) and info.si_pid == parent.pid:
            os._exit(0)
    os._exit(1)


def _end_worker(error: Exception, batch: Any) -> None:
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(1)


class Loading:
    """One pass over a loader.

    Args:
        loader: the loader. Its worker processes start immediately.
        name: name of the loader's option in the configuration (such as `train_dataloader`).
        numbers: non-negative integers, such as (seed, epoch). The workers' seed is computed from these, the initial
            seed of the loader's generator, and the rank, because a resumed run cannot restore the generator's state.
    """

    def __init__(self, loader: DataLoader[Any], name: str, numbers: Sequence[int] = (0, 0)) -> None:
        self.loader, self.name = loader, name
        generator = loader.generator
        own_seed = 0 if generator is None else generator.initial_seed()
        loader.generator = torch.Generator().manual_seed(hash_numbers((*numbers, own_seed, get_rank())))
        if has_changed(loader):
            end_workers(loader)
        if not loader.num_workers and getattr(loader, "order", None) is None:
            seed_objects(find_generators(loader.dataset), (*numbers, get_rank()))
        try:
            with prepared_workers(loader):
                self._iterator: Any = iter(loader)
        except OSError as error:  # the workers' queues and locks are also in shared memory
            if error.errno != errno.ENOSPC:
                raise
            raise DataLoaderError(f"{name}: {_SHARED_MEMORY}") from error
        finally:
            loader.generator = generator
        # The ids of the worker processes.
        self.pids = {worker.pid for worker in getattr(self._iterator, "_workers", ())}
        record_attributes(loader)

    def __iter__(self) -> Iterator[Any]:
        while True:
            try:
                batch = next(self._iterator)
            except StopIteration:
                return
            except Exception as error:
                # While torch knows its workers, its signal handler may raise another error for a dead worker, even
                # while this error is handled.
                _stop_workers(self._iterator)
                reads_batch = self.loader.num_workers and not str(error).startswith(
                    "Caught "
                )  # raised in a worker
                if reads_batch and isinstance(error, ConnectionError | EOFError | FileNotFoundError):
                    raise DataLoaderError(
                        f"{self.name}: a worker died while sending a batch; set num_workers=0 to see the error"
                    ) from error
                raise
            yield batch

    def close(self) -> None:
        """Stop all worker processes that are not persistent. The pass cannot continue afterwards."""
        if not self.loader.persistent_workers:
            _stop_workers(self._iterator)


def end_workers(loader: DataLoader[Any]) -> None:
    """Stop the persistent workers of a loader; the next epoch starts new workers.

    If workers are not stopped explicitly, the traceback of an error may keep them alive, or garbage collection may
    take five seconds per worker, because it closes their queues first.
    """
    if getattr(loader, "_iterator", None) is not None:
        _stop_workers(loader._iterator)
        loader._iterator = None


def has_changed(loader: DataLoader[Any]) -> bool:
    """Return whether attributes of the dataset have changed since `record_attributes`.

    Persistent workers have copies of the dataset and would not use the new values.
    """
    recorded = getattr(loader._iterator, "dataset_attributes", None)
    return recorded is not None and recorded != _attributes(loader.dataset)


def record_attributes(loader: DataLoader[Any]) -> None:
    """Record the attributes of the dataset, if the loader has persistent workers."""
    if loader._iterator is not None:
        loader._iterator.dataset_attributes = _attributes(loader.dataset)  # type: ignore[attr-defined]


def _attributes(dataset: Any) -> list[Any]:
    """Return the identities and values of the dataset's attributes, and of their items and attributes.

    Containers with more than 1000 items are compared by their identity and length.
    """
    found: list[Any] = []
    for value in reachable(dataset):
        if isinstance(value, str | bytes | int | float):
            found.append(value)
            continue
        found.append(type(value) if isinstance(value, tuple) else id(value))
        if isinstance(value, Tensor):
            found.append(value._version)
        elif isinstance(value, dict | list | tuple | set | deque):
            found.append(len(value))
    return found


def _stop_workers(iterator: Any) -> None:
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


@contextmanager
def explain_worker_errors(
    name: str, loadings: Callable[[], Iterable[Loading]] = lambda: ()
) -> Iterator[None]:
    """Replace torch's errors about worker processes with errors that name the loader's option and suggest a remedy.

    When a worker dies, torch raises an error in the training process, at whatever line that process is executing.

    Args:
        name: the loader's option.
        loadings: returns the passes over all loaders, one of which may own the worker that died.

    Raises:
        DataLoaderError: a worker died or timed out, or shared memory or file descriptors were exhausted.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        remedies: Mapping[str, str] = {} if isinstance(error, DataLoaderError) else _REMEDIES
        for pattern, remedy in remedies.items():
            if found := re.search(pattern, str(error)):
                pids = set(map(int, re.findall(r"\d+", found[1]))) if pattern == _DEAD_WORKER else set()
                owner = next((loading.name for loading in loadings() if pids & loading.pids), name)
                raise DataLoaderError(f"{owner}: {found[0]}; {remedy}") from error
        raise
