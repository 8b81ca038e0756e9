"""Resource limits that Linux control groups (cgroups) impose on this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["available_memory", "memory_limit", "quotas"]

_ROOT = Path("/")
_UNLIMITED = 2**60
"""Limits of this size or larger are ignored, because version 1 represents "no limit" as a number close to 2**63."""


def quotas(root: Path = _ROOT) -> list[float]:
    """Return the CPU quotas, in cores, of this process's cgroup (v2) and its parents."""
    cores = []
    for version, folder in _folders(root, "cpu"):
        file = folder / "cpu.max"
        if version == 2 and file.is_file():
            quota, period = file.read_text(encoding="utf-8").split()
            cores += [] if quota == "max" else [int(quota) / int(period)]
    return cores


def memory_limit(root: Path = _ROOT) -> int | None:
    """Return the smallest memory limit in bytes of this process's cgroups (v1 and v2), or None if there is no limit."""
    limits = (_limit(version, folder) for version, folder in _folders(root, "memory"))
    return min((limit for limit in limits if limit is not None), default=None)


def available_memory(root: Path = _ROOT) -> int | None:
    """Return the number of bytes that this process can allocate before a cgroup reaches its limit.

    The result is None if no cgroup has a limit, or if the usage cannot be read.

    The page cache counts as available memory, because the kernel reclaims it when a cgroup reaches its limit.
    """
    available = []
    for version, folder in _folders(root, "memory"):
        limit = _limit(version, folder)
        with suppress(OSError, ValueError):
            usage = int(
                (folder / ("memory.current" if version == 2 else "memory.usage_in_bytes")).read_text()
            )
            # In version 1, the entries without this prefix exclude child cgroups.
            prefix = "" if version == 2 else "total_"
            names = (f"{prefix}inactive_file", f"{prefix}active_file")
            lines = [line.split() for line in (folder / "memory.stat").read_text().splitlines()]
            cached = sum(int(value) for name, value in lines if name in names)
            available += [] if limit is None else [limit - usage + cached]
    return min(available, default=None)


def _limit(version: int, folder: Path) -> int | None:
    file = folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")
    text = file.read_text(encoding="utf-8").strip() if file.is_file() else "max"
    return int(text) if text.isdecimal() and int(text) < _UNLIMITED else None


def _folders(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yield `(version, folder)` for each of this process's cgroups that has the controller, and for their parents."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version, base = 2, root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            version, base = 1, root / "sys/fs/cgroup" / controller
        else:
            continue
        folder = base / path.strip("/")
        for part in (folder, *folder.parents):
            if part.is_relative_to(base):
                yield version, part
