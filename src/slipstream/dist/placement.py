"""Rank, world size and address of a process, read from the environment variables of its launcher."""

from __future__ import annotations

import itertools
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from slipstream.errors import DistributedError, did_you_mean

Launcher = Literal["none", "pytorch", "slurm", "mpi"]
LAUNCHERS: tuple[Launcher, ...] = ("none", "pytorch", "slurm", "mpi")
DEFAULT_PORT = "29500"
# Variables for rank, world size, local rank and local size in Open MPI, MVAPICH2 and Hydra (MPICH, Intel MPI).
_MPI_FAMILIES = (
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    tuple(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


@dataclass(frozen=True)
class Placement:
    """Ranks of this process, sizes of the job, and the address at which rank 0 listens."""

    rank: int
    local_rank: int
    world_size: int
    master_addr: str
    master_port: str
    # Number of processes on this machine; None if the launcher does not set it.
    local_size: int | None = None

    def environ(self) -> dict[str, str]:
        """Return the environment variables that torch reads."""
        values = {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
        }
        return values if self.local_size is None else {**values, "LOCAL_WORLD_SIZE": str(self.local_size)}


def read_placement(launcher: str, environ: Mapping[str, str], port: int | str | None = None) -> Placement:
    """Read the placement of this process from the environment variables that `launcher` sets.

    Raises:
        DistributedError: the launcher is unknown, a variable is missing or not a number, or the rank is not less than
            the world size. The message names the launcher or the variable.
    """
    readers = {"pytorch": _torchrun, "slurm": _slurm, "mpi": _mpi}
    if launcher not in readers:
        raise DistributedError(
            f"unknown launcher {launcher!r}{did_you_mean(launcher, LAUNCHERS)}; use one of {', '.join(readers)}"
        )
    placement = readers[launcher](environ, str(port) if port else None)
    if placement.rank >= placement.world_size:
        raise DistributedError(
            f"RANK={placement.rank} must be less than WORLD_SIZE={placement.world_size}; ranks start at 0, and the "
            "world size is the total number of processes on all machines"
        )
    return placement


def infer_launcher(environ: Mapping[str, str] | None = None) -> Launcher:
    """Return the launcher whose environment variables are set, or `none` if no such variables are set."""
    environ = os.environ if environ is None else environ
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return "pytorch"
    # mpirun inside a Slurm job also passes Slurm's variables. srun also sets PMI_RANK, but no local rank.
    if any(rank in environ and local in environ for rank, _, local, _ in _MPI_FAMILIES):
        return "mpi"
    return "slurm" if "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ else "none"


def unused_launcher() -> Launcher | None:
    """Return the launcher that started several processes, or None if no launcher did.

    Call this function only if no process group exists.
    """
    launcher = infer_launcher()
    try:
        single_process = launcher == "none" or read_placement(launcher, os.environ).world_size == 1
    except DistributedError:  # the job's environment variables are set, but those of the process are not
        return None
    return None if single_process else launcher


def read_str(environ: Mapping[str, str], name: str, launcher: str) -> str:
    """Return the value of a variable that the launcher must have set."""
    if not environ.get(name):
        raise DistributedError(
            f"launcher '{launcher}' requires the environment variable {name}, which is not set; check that this "
            "launcher started the program"
        )
    return environ[name]


def read_int(environ: Mapping[str, str], name: str, launcher: str) -> int:
    """Return the value of a variable that must be a non-negative integer."""
    value = read_str(environ, name, launcher)
    if not value.isdecimal():
        raise DistributedError(
            f"the environment variable {name} must be a non-negative integer, not {value!r}"
        )
    return int(value)


def _torchrun(environ: Mapping[str, str], port: str | None) -> Placement:
    local = environ.get("LOCAL_WORLD_SIZE")
    return Placement(
        rank=read_int(environ, "RANK", "pytorch"),
        local_rank=read_int(environ, "LOCAL_RANK", "pytorch"),
        world_size=read_int(environ, "WORLD_SIZE", "pytorch"),
        master_addr=read_str(environ, "MASTER_ADDR", "pytorch"),
        master_port=port or str(read_int(environ, "MASTER_PORT", "pytorch")),
        local_size=read_int(environ, "LOCAL_WORLD_SIZE", "pytorch") if local else None,
    )


# ---- MPI -----------------------------------------------------------------------------------------------


def _mpi(environ: Mapping[str, str], port: str | None) -> Placement:
    family = next((family for family in _MPI_FAMILIES if environ.get(family[0])), None)
    if family is None:
        names = ", ".join(family[0] for family in _MPI_FAMILIES)
        raise DistributedError(
            f"launcher 'mpi' requires one of {names}, but none of them is set; start the program with mpirun"
        )
    rank, size, local_rank, local_size = family
    world = read_int(environ, size, "mpi")
    local = read_int(environ, local_size, "mpi") if environ.get(local_size) else None
    master = environ.get("MASTER_ADDR") or ("127.0.0.1" if local == world else None)
    if master is None:
        raise DistributedError(
            f"launcher 'mpi' requires MASTER_ADDR unless all {world} processes run here ({local_size}={local}); "
            "use `mpirun -x MASTER_ADDR=host` (Open MPI) or `mpiexec -genv MASTER_ADDR host` (MPICH, Intel MPI)"
        )
    # Two jobs on one machine need different ports. Open MPI sets a variable that identifies the job; Hydra does not.
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    job_port = str(20000 + zlib.crc32(job.encode()) % 10000) if job else DEFAULT_PORT
    return Placement(
        rank=read_int(environ, rank, "mpi"),
        local_rank=read_int(environ, local_rank, "mpi"),
        world_size=world,
        master_addr=master,
        master_port=port or environ.get("MASTER_PORT") or job_port,
        local_size=local,
    )


# ---- Slurm ---------------------------------------------------------------------------------------------


def _slurm(environ: Mapping[str, str], port: str | None) -> Placement:
    """Read the variables of the job step rather than those of the job, because a step may use only some nodes."""
    size = _first_set(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    world = read_int(environ, size, "slurm")
    if "SLURM_STEP_ID" not in environ and world > 1:
        raise DistributedError(
            f"{size}={world}, but SLURM_STEP_ID is not set: this process is running in the batch script or the salloc "
            "shell, where Slurm starts only one process; start the program with srun"
        )
    nodes = _first_set(environ, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    port = port or environ.get("MASTER_PORT")
    if not port:
        # Jobs that share a node have similar ids, but must use different ports. Ports 20000 to 29999 do not overlap
        # with Slurm's ports (from 6817; those of srun, from 60001) or Linux's ephemeral ports (from 32768).
        step = int(environ.get("SLURM_STEP_ID") or 0)
        port = str(20000 + (8 * read_int(environ, "SLURM_JOB_ID", "slurm") + step) % 10000)
    return Placement(
        rank=read_int(environ, "SLURM_PROCID", "slurm"),
        local_rank=read_int(environ, "SLURM_LOCALID", "slurm"),
        world_size=world,
        master_addr=environ.get("MASTER_ADDR") or expand_nodelist(read_str(environ, nodes, "slurm"))[0],
        master_port=port,
        local_size=_slurm_local_size(environ),
    )


def _first_set(environ: Mapping[str, str], *names: str) -> str:
    """Return the first name in `names` that is set in `environ`, or `names[0]` if none is set."""
    return next((name for name in names if environ.get(name)), names[0])


def _slurm_local_size(environ: Mapping[str, str]) -> int | None:
    """Return the number of tasks on this node, which Slurm stores in a list such as `3,2(x2)`, or None."""
    tasks = environ.get(_first_set(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), "")
    pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
    counts = [int(count) for count, times in pairs for _ in range(int(times or 1))]
    node = environ.get("SLURM_NODEID", "")
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else None


def expand_nodelist(nodelist: str) -> list[str]:
    """Return the hosts in a Slurm node list; for example, `n[01-03,7],gpu1` expands to `n01 n02 n03 n7 gpu1`.

    Raises:
        DistributedError: `nodelist` is not a valid node list.
    """
    host = r"(?:[^,\[\]]|\[\d[\d,-]*\])+"
    if not re.fullmatch(rf"{host}(,{host})*", nodelist):
        raise DistributedError(f"{nodelist!r} is not a valid Slurm node list (example: n[01-03,7],gpu1)")
    hosts: list[str] = []
    for name in re.findall(host, nodelist):
        pieces = re.findall(r"\[([^\[\]]*)\]|([^\[\]]+)", name)
        parts = [[literal] if literal else list(_numbers(ranges)) for ranges, literal in pieces]
        hosts += map("".join, itertools.product(*parts))
    return hosts


def _numbers(ranges: str) -> Iterator[str]:
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", ranges):
        yield from (f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1))
