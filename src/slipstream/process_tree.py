"""Terminate a process together with the processes that it started."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

__all__ = ["descendants", "kill", "kill_group"]


def descendants(pid: int) -> dict[int, str]:
    """Return a dict that maps the ids of a process's descendants to their start times.

    The dict is empty on systems other than Linux. The start time distinguishes a process from a later
    process with the same id.
    """
    found: dict[int, str] = {}
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, file.read_text().split()):
                if (time := _start_time(child)) is not None:
                    found[child] = time
                found |= descendants(child)
    return found


def kill(processes: Mapping[int, str]) -> None:
    """Kill the processes returned by `descendants` that are still running."""
    for pid, time in processes.items():
        if _start_time(pid) == time:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def kill_group(group: int, processes: Mapping[int, str]) -> None:
    """Kill a process group and its leader's descendants in other groups, such as Inductor's workers.

    Args:
        group: id of the process group, which may no longer exist.
        processes: the leader's descendants, collected while the leader was running.
    """
    with suppress(OSError):
        os.killpg(group, signal.SIGKILL)
    kill(processes)


def _start_time(pid: int) -> str | None:
    """Return the start time of a process, or None if the process does not exist."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]
