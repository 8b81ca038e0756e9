"""Prepare data loader workers for signals and faults that torch's workers do not handle."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from multiprocessing import forkserver, parent_process, resource_tracker
from multiprocessing.queues import Queue
from typing import Any

from torch.utils.data import DataLoader

__all__ = ["WorkerInit", "prepared_workers", "signals_blocked", "worker_init"]

_IGNORED_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
]
_POLL_INTERVAL = 1.0
"""Interval in seconds at which a worker checks whether the training process is alive."""


@dataclass(frozen=True)
class WorkerInit:
    """A `worker_init_fn` that prepares the worker and calls the user's function.

    - SIGINT, SIGHUP, SIGUSR1, SIGUSR2 and SIGTERM are ignored, except SIGTERM from the training process. Terminals,
      Slurm and torchrun also send signals to the workers, but the training process still needs its workers until it
      has saved a checkpoint after the current step.
    - Processes that a worker starts inherit these signal settings. Terminate such processes with SIGKILL.
    - The worker exits when the training process dies. torch's workers check only between batches whether the training
      process is alive, so they do not exit if loading a sample hangs.
    - The worker exits if it cannot send a batch, for example because shared memory is full or the batch cannot be
      pickled. torch's workers would lose the batch, and the run would wait for the batch forever.

    Args:
        user_init: the user's `worker_init_fn`, or None.
        owner: id of the process that creates the workers.
    """

    user_init: Callable[[int], None] | None = None
    owner: int = field(default_factory=os.getpid)

    def __call__(self, worker_id: int) -> None:
        """Prepare this worker process."""
        if os.getpid() != self.owner:  # a worker may also be a thread of the owner
            self._prepare()
        if self.user_init is not None:
            self.user_init(worker_id)

    def _prepare(self) -> None:
        for number in _IGNORED_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if hasattr(signal, "sigtimedwait"):
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED_SIGNALS)  # blocked by `signals_blocked`
        threading.Thread(target=_end_with_parent, daemon=True).start()
        Queue._on_queue_feeder_error = staticmethod(_end_worker)  # type: ignore[attr-defined]


def worker_init(user_init: Callable[[int], None] | None) -> WorkerInit:
    """Return a `WorkerInit` that calls `user_init`."""
    return user_init if isinstance(user_init, WorkerInit) else WorkerInit(user_init)


@contextmanager
def signals_blocked(loader: DataLoader[Any]) -> Iterator[None]:
    """Block signals in this thread while the workers of `loader` start, if a `WorkerInit` prepares them.

    New processes inherit the blocked signals. Without this context, a signal that arrives before `WorkerInit` has run,
    such as SIGTERM from Slurm, would terminate the worker and therefore the run.
    """
    if not isinstance(loader.worker_init_fn, WorkerInit) or not hasattr(signal, "sigtimedwait"):
        yield
        return
    method = _start_method(loader) if loader.num_workers else None
    if method in ("spawn", "forkserver"):
        resource_tracker.ensure_running()  # if it started later, it would unblock SIGINT and SIGTERM
    if method == "forkserver":
        forkserver.ensure_running()  # the server and its processes would otherwise keep these signals blocked
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, [*_IGNORED_SIGNALS, signal.SIGTERM])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


@contextmanager
def prepared_workers(loader: Any, block_signals: bool = True) -> Iterator[None]:
    """Let a `WorkerInit` prepare the workers that the user's loader starts in this context; see `signals_blocked`."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        yield
        return
    user_init = loader.worker_init_fn
    loader.worker_init_fn = worker_init(user_init)
    try:
        with signals_blocked(loader) if block_signals else nullcontext():
            yield
    finally:
        loader.worker_init_fn = user_init


def _start_method(loader: DataLoader[Any]) -> str:
    context: Any = loader.multiprocessing_context
    return str(multiprocessing.get_start_method() if context is None else context.get_start_method())


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
