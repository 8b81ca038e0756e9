"""Terminate a process together with the processes that it started."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

__all__ = ["descendants", "kill", "kill_group"]

_MAX_WAIT = 10.0


def descendants(pid: int) -> dict[int, str]:
    """Return a dict that maps the ids of a process's descendants to their start times.

    The dict is empty on systems other than Linux. The start time distinguishes a process from a later
    process with the same id.
    """
    found: dict[int, str] = {}
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, file.read_text().split()):
                if (start := _start_time(child)) is not None:
                    found[child] = start
                found |= descendants(child)
    return found


def kill(processes: Mapping[int, str]) -> None:
    """Kill the processes returned by `descendants` that are still running."""
    for pid, start in processes.items():
        if _start_time(pid) == start:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def kill_group(group: int, processes: Mapping[int, str]) -> None:
    """Kill a process group and its leader's descendants in other groups, such as Inductor's workers.

    Wait up to ten seconds for the descendants to end, so that their memory is free again.

    Args:
        group: id of the process group, which may no longer exist.
        processes: the leader's descendants, collected while the leader was running.
    """
    with suppress(OSError):
        os.killpg(group, signal.SIGKILL)
    kill(processes)
    end = time.monotonic() + _MAX_WAIT
    while any(_start_time(pid) == start for pid, start in processes.items()) and time.monotonic() < end:
        time.sleep(0.001)


def _start_time(pid: int) -> str | None:
    """Return the start time of a process, or None if the process does not exist or is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]
