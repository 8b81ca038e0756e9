"""Compile a step in a child process while the parent process trains eagerly.

The child is created with `fork`, so it has copies of the model, the batch and torch's state. It writes the compiled
code to torch's on-disk cache, and the parent loads the code from there. The child has no other side effects. It runs at
low priority unless the parent waits for it.
"""

from __future__ import annotations

import contextvars
import gc
import logging
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

__all__ = ["BackgroundCompiler", "can_fork"]

_NICE = 12
"""Amount added to the child's nice value; see nice(2). With this value, a background compilation makes training
on all cores 2 to 6% slower (`benchmarks/background.py`), and the child gets 6 to 7% of a core."""
DEFAULT_LIMIT = 2 * 3600.0
"""Default timeout of the child process in seconds."""
_POLL_INTERVAL = 0.05
"""Seconds between checks of whether the child process has exited."""


def can_fork(device_type: str) -> bool:
    """Return whether a forked process can compile for a device and share the result through torch's cache.

    Only the CPU on Linux is supported: inductor queries accelerator properties, which is not possible in a forked
    process, and macOS system libraries do not work after a fork.
    """
    caches = torch._inductor.config.fx_graph_cache and not torch.compiler.config.force_disable_caches
    return sys.platform == "linux" and device_type == "cpu" and bool(caches)


class BackgroundCompiler:
    """Runs functions in a forked process, one at a time. Only the files that a function writes persist.

    Args:
        limit: timeout in seconds for each function call; two hours by default.
        wait: whether `start` blocks until the function returns.
    """

    def __init__(self, limit: float | None = None, wait: bool = False) -> None:
        self.wait = wait
        self.limit = DEFAULT_LIMIT if limit is None else limit
        """Timeout of the child process in seconds."""
        self._pid: int | None = None
        self._start_time = 0.0
        self.seconds: float | None = None
        """Duration of the last function call in seconds; None if the call failed."""
        self.exceeded = False
        """Whether the process of the last function call was killed because it exceeded the timeout."""

    @property
    def started(self) -> bool:
        """Whether a process was started and has not yet been reaped by `done` or `stop`."""
        return self._pid is not None

    def start(self, work: Callable[[], object]) -> None:
        """Start `work()` in a forked process; its exceptions and output are discarded.

        Raises:
            OSError: the process cannot be started.
        """
        self.stop()
        self.seconds, self.exceeded = None, False
        self._start_time = time.monotonic()
        parent = os.getpid()
        # Block signals, so that no handler runs in the child, or interrupts this process before `_finalizer` is set.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            # os.fork warns about deadlocks, but the child does not use the parent's locks.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                _work_and_exit(work, parent, mask, 0 if self.wait else _NICE)
            self._pid = pid
            self._finalizer = weakref.finalize(self, _kill, pid)
            # The child and its C++ compilers get their own process group. Both processes set it, to avoid a race.
            with suppress(OSError):
                os.setpgid(pid, pid)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        while self.wait and not self.done():
            time.sleep(_POLL_INTERVAL)

    def done(self) -> bool:
        """Return True if no process is running. A process that has exceeded its timeout is killed."""
        if self._pid is None:
            return True
        seconds = time.monotonic() - self._start_time
        if (status := _exit_status(self._pid)) is not None:
            self._finalizer.detach()
            self._pid = None
            self.seconds = seconds if status == 0 else None
        elif seconds > self.limit:
            self.stop()
            self.exceeded = True
        return self._pid is None

    def stop(self) -> None:
        """Kill the process if it is running."""
        if self._pid is not None:
            self._finalizer()
            self._pid = None


def _exit_status(pid: int) -> int | None:
    """Return the exit status of a child process, or None if it is still running."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:  # other code has already waited for this child
        return 0
    return os.waitstatus_to_exitcode(status) if ended == pid else None


def _kill(pid: int) -> None:
    if _exit_status(pid) is not None:
        return
    for kill in (os.killpg, os.kill):  # the process group may not exist yet
        with suppress(OSError):
            kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _work_and_exit(work: Callable[[], object], parent: int, mask: Iterable[int], nice: int) -> None:
    """Call `work` in the child process, and exit without running the parent's exit handlers."""
    status = 1
    try:
        os.setpgid(0, 0)
        os.nice(nice)
        _detach_from_parent()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # Keep the old streams alive, because destroying them would write the parent's buffered output again.
        done: list[bool] = []
        work = partial(_suppress_errors, work, done, sys.stdout, sys.stderr)
        sys.stdout = sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
        # The parent's thread pools (inductor's, and the forking thread's OpenMP pool) do not exist in the child, so
        # call `work` in a new thread. Copy the context, because torch's settings are context variables.
        torch._inductor.config.compile_threads = 1
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(work,), daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(1.0)
            if os.getppid() != parent:
                os.killpg(0, signal.SIGKILL)
        status = 0 if done else 1
    finally:
        os._exit(status)


def _detach_from_parent() -> None:
    """Release the parent's files, sockets, locks and signal handlers, and disable logging, to avoid side effects."""
    gc.freeze()  # prevents finalizers of the parent's objects from running
    logging.disable(logging.CRITICAL)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            ends = number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
            signal.signal(number, signal.SIG_DFL if ends else signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for file in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):  # the descriptor used to list the directory is already closed
            # Redirect instead of closing, so that the descriptor is not reused and then closed by its former owner.
            os.fstat(file)
            os.dup2(null, file, inheritable=file < 3)


def _suppress_errors(work: Callable[[], object], done: list[bool], *_streams: object) -> None:
    with suppress(BaseException):
        work()
        done.append(True)
