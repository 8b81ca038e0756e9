"""Compile a step in another process, while this one trains eagerly.

The other process is a copy of this one (`fork`), so it has the model, the batch and whatever torch has compiled so far.
It leaves the compiled code in torch's cache on disk, where this process then finds it. It changes nothing else, and
runs at a low priority.
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
"""What is added to the nice value of this process (nice(2)): where training keeps all cores busy, it becomes 2 to 6 %
slower (`benchmarks/background.py`), and compilation gets 6 to 7 % of a core."""
_LIMIT = 2 * 3600.0
"""Seconds after which the other process is ended."""


def can_fork(device_type: str) -> bool:
    """Say whether a copy of this process can compile for a device, and share what it made.

    An accelerator cannot be used in a forked process, and inductor asks it for its properties. On macOS, system
    libraries do not survive a fork.
    """
    caches = torch._inductor.config.fx_graph_cache and not torch.compiler.config.force_disable_caches
    return sys.platform == "linux" and device_type == "cpu" and bool(caches)


class BackgroundCompiler:
    """Runs one function at a time in a copy of this process, for what it leaves in files."""

    def __init__(self) -> None:
        self._pid: int | None = None
        self._began = 0.0
        self.seconds: float | None = None
        """How long the last function took; None if it failed."""

    @property
    def started(self) -> bool:
        """Whether a process was started that has not been waited for."""
        return self._pid is not None

    def start(self, work: Callable[[], object]) -> None:
        """Start `work()` in a copy of this process; whatever it raises or prints is lost.

        Raises:
            OSError: no process can be started.
        """
        self.stop()
        self.seconds = None
        self._began = time.monotonic()
        parent = os.getpid()
        # No handler of a signal may run in the copy, nor raise here before the copy has an owner.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with warnings.catch_warnings():  # of threads, whose locks the copy does not need
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                _work_and_exit(work, parent, mask)
            self._pid = pid
            self._end = weakref.finalize(self, _kill, pid)
            # The copy has a group of its own, with the C++ compilers that it starts. It makes the group, too.
            with suppress(OSError):
                os.setpgid(pid, pid)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def done(self) -> bool:
        """Return whether the process has ended, however it did, or none was started."""
        if self._pid is None:
            return True
        seconds = time.monotonic() - self._began
        if seconds > _LIMIT:
            self.stop()
        elif (status := _exit_status(self._pid)) is not None:
            self._end.detach()
            self._pid = None
            self.seconds = seconds if status == 0 else None
        return self._pid is None

    def stop(self) -> None:
        """End the process, if one was started."""
        if self._pid is not None:
            self._end()
            self._pid = None


def _exit_status(pid: int) -> int | None:
    """Return the exit status of a child process, None while it runs."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:  # somebody else has waited for all children
        return 0
    return os.waitstatus_to_exitcode(status) if ended == pid else None


def _kill(pid: int) -> None:
    if _exit_status(pid) is not None:
        return
    for kill in (os.killpg, os.kill):  # the group does not exist before the process has begun to run
        with suppress(OSError):
            kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _work_and_exit(work: Callable[[], object], parent: int, mask: Iterable[int]) -> None:
    """Do the work of the new process, which ends here: nothing that was registered for the exit of the first runs."""
    status = 1
    try:
        os.setpgid(0, 0)
        os.nice(_NICE)
        _leave_alone_what_is_the_parents()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # At the end of the old ones, they would write what the first process has printed and not yet written.
        done: list[bool] = []
        work = partial(_quietly, work, done, sys.stdout, sys.stderr)
        sys.stdout = sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
        # The threads of the first process do not exist here: neither those of inductor's pool, nor those of OpenMP's,
        # which belongs to the thread that forked. Torch's settings are part of the context.
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


def _leave_alone_what_is_the_parents() -> None:
    """Give up files, sockets, locks, signals and logs, so that nothing is done twice or kept open."""
    gc.freeze()  # finalizers of what is garbage here would do their work twice
    logging.disable(logging.CRITICAL)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            ends = number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
            signal.signal(number, signal.SIG_DFL if ends else signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for file in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):  # of the listing itself, which is closed
            # Not closed: whoever closes the number later would close another file that has it by then.
            os.fstat(file)
            os.dup2(nowhere, file, inheritable=file < 3)


def _quietly(work: Callable[[], object], done: list[bool], *_kept: object) -> None:
    with suppress(BaseException):
        work()
        done.append(True)
