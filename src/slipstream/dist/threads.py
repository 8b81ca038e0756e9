"""Wait for gloo's threads before the interpreter exits.

A gloo thread releases the tensors of a collective shortly after the collective returns, and acquires the GIL to do
so. If the interpreter is already shutting down, Python versions before 3.14 end the thread with `pthread_exit`, which
unwinds the stack. Unwinding reaches a C++ frame that must not be unwound, and the process aborts with "terminate called
without an active exception" even though all work is done (pytorch/pytorch#190489). `destroy_process_group` does not
help if another object, such as a DDP wrapper, still references the group. Only Linux is affected, because only glibc's
`pthread_exit` unwinds the stack.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

__all__ = ["wait_for_gloo_threads"]

_NAME = "pt_gloo_runloop"


def wait_for_gloo_threads(timeout: float = 2.0) -> None:
    """Wait until all gloo threads are idle, for at most `timeout` seconds.

    The timeout is shorter than `PATIENCE` in `dist/failure_detection.py`, so a failed rank still exits before the
    other ranks. A thread that waits for the GIL also sleeps, but it wakes up when this thread releases the GIL.
    """
    deadline = time.monotonic() + timeout
    previous: list[tuple[str, str]] = []
    while (current := _states()) and time.monotonic() < deadline:
        if current == previous and all(state == "S" for state, _ in current):
            return
        previous = current
        time.sleep(2 * sys.getswitchinterval())  # waiting threads try to acquire the GIL once per interval


def _states() -> list[tuple[str, str]]:
    """Return the state (`S`: sleeping) and the number of voluntary context switches of each gloo thread."""
    states = []
    for path in sorted(Path("/proc/self/task").glob("*/status")):
        with contextlib.suppress(OSError):  # the thread has ended
            status = dict(line.split(":\t", 1) for line in path.read_text().splitlines())
            if status["Name"] == _NAME:
                states.append((status["State"][0], status["voluntary_ctxt_switches"]))
    return states
