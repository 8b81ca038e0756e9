"""Let gloo's threads come to rest before the interpreter ends.

A thread of gloo drops the tensors of a collective a moment after its waiter went on, and takes Python's lock for
it. When the interpreter has begun to end by then, Python below 3.14 ends the thread by `pthread_exit`, whose
unwinding meets a C++ frame that forbids it, and the process aborts with "terminate called without an active
exception" after all its work is done (pytorch/pytorch#190489). `destroy_process_group` does not help where a DDP
wrapper, for one, still holds the group. Only glibc unwinds, hence Linux alone.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

__all__ = ["rest_gloo_threads"]

_NAME = "pt_gloo_runloop"


def rest_gloo_threads(patience: float = 2.0) -> None:
    """Wait until every thread of gloo sleeps and nothing wakes it, for `patience` seconds at most.

    That is less than the other ranks grant one that failed (`dist/failure_detection.py`), so that it still ends first.
    A thread that waits for Python's lock sleeps too, but wakes when this thread gives the lock away for a while.
    """
    deadline = time.monotonic() + patience
    before: list[tuple[str, str]] = []
    while (now := _states()) and time.monotonic() < deadline:
        if now == before and all(state == "S" for state, _ in now):
            return
        before = now
        time.sleep(2 * sys.getswitchinterval())  # who waits for the lock looks for it once in an interval


def _states() -> list[tuple[str, str]]:
    """Return, of each thread of gloo, its state, `S` for asleep, and how often it has gone to sleep."""
    states = []
    for path in sorted(Path("/proc/self/task").glob("*/status")):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            status = dict(line.split(":\t", 1) for line in path.read_text().splitlines())
            if status["Name"] == _NAME:
                states.append((status["State"][0], status["voluntary_ctxt_switches"]))
    return states
