"""Placement of a Slurm task, and expansion of Slurm node lists."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Iterator, Mapping

from slipstream.dist.placement import Placement, first_set, read_int, read_str
from slipstream.errors import DistributedError

__all__ = ["expand_nodelist", "first_host", "slurm_placement"]

_OUTSIDE_BRACKETS = r"((?:[^,\[\]]|\[[^\[\]]*\])+)(?:,|$)"
_PIECE = r"\[([^\[\]]*)\]|([^\[\]]+)"
_RANGE = r"(\d+)(?:-(\d+))?"


def expand_nodelist(nodelist: str) -> list[str]:
    """Return the hosts in a Slurm node list; for example, `n[01-03,7],gpu1` expands to `n01 n02 n03 n7 gpu1`.

    Raises:
        DistributedError: `nodelist` is not a valid node list.
    """
    hosts: list[str] = []
    position = 0
    outside_brackets = re.compile(_OUTSIDE_BRACKETS)
    while match := outside_brackets.match(nodelist, position):
        pieces = [
            [literal] if literal else list(_numbers(ranges, nodelist))
            for ranges, literal in re.findall(_PIECE, match[1])
        ]
        hosts += ("".join(parts) for parts in itertools.product(*pieces))
        position = match.end()
    if position != len(nodelist) or not hosts or nodelist.endswith(","):
        raise DistributedError(f"{nodelist!r} is not a valid Slurm node list (example: n[01-03,7],gpu1)")
    return hosts


def first_host(nodelist: str) -> str:
    """Return the first host in a Slurm node list, using `scontrol` if it is installed."""
    try:
        result = subprocess.run(
            ["scontrol", "show", "hostnames", nodelist],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
        return result.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return expand_nodelist(nodelist)[0]


def slurm_placement(environ: Mapping[str, str], port: str | None) -> Placement:
    """Read the placement of a Slurm task from `environ`.

    The variables of the job step take precedence over those of the job, because a step may use only some of the nodes.
    """
    size = first_set(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    world = read_int(environ, size, "slurm")
    if "SLURM_STEP_ID" not in environ and world > 1:
        raise DistributedError(
            f"{size}={world}, but SLURM_STEP_ID is not set: this process is running in the batch script or the salloc "
            "shell, where Slurm starts only one process; start the program with srun"
        )
    nodes = first_set(environ, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    address = environ.get("MASTER_ADDR") or first_host(read_str(environ, nodes, "slurm"))
    sources = {
        "RANK": "SLURM_PROCID",
        "LOCAL_RANK": "SLURM_LOCALID",
        "WORLD_SIZE": size,
        "MASTER_ADDR": "MASTER_ADDR" if environ.get("MASTER_ADDR") else f"{nodes}={environ[nodes]}",
    }
    if not port and not environ.get("MASTER_PORT"):
        sources["MASTER_PORT"] = f"SLURM_JOB_ID={environ.get('SLURM_JOB_ID')}"
    return Placement(
        rank=read_int(environ, "SLURM_PROCID", "slurm"),
        local_rank=read_int(environ, "SLURM_LOCALID", "slurm"),
        world_size=world,
        master_addr=address,
        master_port=port or _port(environ),
        local_size=_local_size(environ),
        sources=sources,
    )


def _port(environ: Mapping[str, str]) -> str:
    if environ.get("MASTER_PORT"):
        return str(read_int(environ, "MASTER_PORT", "slurm"))
    # Jobs that share a node have similar ids, but must use different ports. Ports 20000 to 29999 do not overlap with
    # Slurm's ports (from 6817; those of srun, from 60001) or Linux's ephemeral ports (from 32768).
    job = read_int(environ, "SLURM_JOB_ID", "slurm")
    step = read_int(environ, "SLURM_STEP_ID", "slurm") if environ.get("SLURM_STEP_ID") else 0
    return str(20000 + (8 * job + step) % 10000)


def _local_size(environ: Mapping[str, str]) -> int | None:
    """Return the number of tasks on this node, or None if it is unknown.

    Slurm stores the number of tasks on each node in a list such as `3,2(x2)`.
    """
    tasks = environ.get(first_set(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), "")
    counts = [
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
        for _ in range(int(times or 1))
    ]
    node = environ.get("SLURM_NODEID", "")
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else None


def _numbers(ranges: str, nodelist: str) -> Iterator[str]:
    for part in ranges.split(","):
        match = re.fullmatch(_RANGE, part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise DistributedError(
                f"{nodelist!r} is not a valid Slurm node list: {part!r} is not a number or range"
            )
        first, last = match[1], match[2] or match[1]
        yield from (f"{i:0{len(first)}d}" for i in range(int(first), int(last) + 1))
