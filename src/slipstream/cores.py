"""The processor, and the number of its cores that are available to this process."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path

__all__ = ["cores", "cpu_name", "quotas"]


def cores() -> int:
    """Return the number of cores this process may use, as limited by its CPU affinity and cgroup (v2) quotas."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min([found, *map(math.ceil, quotas())]), 1)


def cpu_name() -> str:
    """Return the name of the processor, or its architecture if the name is unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def quotas() -> list[float]:
    """Return the CPU quotas, in cores, of this process's cgroup and its parents."""
    root, found = Path("/sys/fs/cgroup"), []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    inside = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")
    for folder in (root / inside, *(root / inside).parents):
        if folder.is_relative_to(root) and (file := folder / "cpu.max").is_file():
            quota, period = file.read_text().split()
            found += [] if quota == "max" else [int(quota) / int(period)]
    return found
