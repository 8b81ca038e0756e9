"""The name and features of the CPU, and the number of cores available to this process."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path

from slipstream.cgroups import quotas


def cores() -> int:
    """Return the number of cores this process may use, as limited by its CPU affinity and cgroup (v2) quotas."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min([count, *map(math.ceil, quotas())]), 1)


def cpu_name() -> str:
    """Return the name of the CPU, or its architecture if the name is unknown."""
    names = (line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def cpu_features() -> list[str]:
    """Return lines that identify the CPU model and instruction set, or an empty list if both are unknown."""
    names = ("model name", "flags", "Features", "CPU part")
    return sorted({line for line in _cpu_lines() if line.startswith(names)})


def _cpu_lines() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
