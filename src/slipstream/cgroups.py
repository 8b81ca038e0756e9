"""Resource limits that Linux control groups (cgroups, version 2) impose on this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/")


def quotas(root: Path = _ROOT) -> list[float]:
    """Return the CPU quotas, in cores, of this process's cgroup and its parents."""
    limits = (text.split() for _, text in _files(root, "cpu.max"))
    return [int(quota) / int(period) for quota, period in limits if quota != "max"]


def memory_limit(root: Path = _ROOT) -> int | None:
    """Return the smallest memory limit in bytes of this process's cgroup and its parents, or None if there is none."""
    return min((int(text) for _, text in _files(root, "memory.max") if text != "max"), default=None)


def available_memory(root: Path = _ROOT) -> int | None:
    """Return the number of bytes that this process can allocate before a cgroup reaches its limit, if there is one.

    The page cache counts as available memory, because the kernel reclaims it when a cgroup reaches its limit.
    """
    available = []
    for folder, limit in _files(root, "memory.max"):
        if limit != "max":
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
            available.append(int(limit) - int((folder / "memory.current").read_text()) + cached)
    return min(available, default=None)


def _files(root: Path, name: str) -> Iterator[tuple[Path, str]]:
    """Yield the folder of this process's cgroup and those of its parents, and the text of the file `name` in each."""
    lines: list[str] = []
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    base = root / "sys/fs/cgroup"
    for line in lines:
        folder = base / line.removeprefix("0::").strip("/")
        for part in (folder, *folder.parents) if line.startswith("0::") else ():
            if part.is_relative_to(base) and (part / name).is_file():
                yield part, (part / name).read_text(encoding="utf-8").strip()
