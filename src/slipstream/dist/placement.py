"""Rank, world size and address of a process, read from the environment variables of its launcher."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from slipstream.errors import DistributedError, did_you_mean

__all__ = [
    "LAUNCHERS",
    "Launcher",
    "Placement",
    "first_set",
    "infer_launcher",
    "read_int",
    "read_placement",
    "read_str",
    "unused_launcher",
]

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
    local_size: int | None = None
    """Number of processes on this machine; None if the launcher does not set it."""
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    """The launcher's variable from which each of RANK, WORLD_SIZE, ... was read."""

    def describe(self, name: str) -> str:
        """Return the value and source of a variable that torch reads, such as `"WORLD_SIZE=4 (from SLURM_NTASKS)"`."""
        value = self.environ()[name]
        source = self.sources.get(name, name)
        return f"{name}={value}" if source == name else f"{name}={value} (from {source})"

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
    from slipstream.dist.slurm import slurm_placement

    readers = {"pytorch": _torchrun, "slurm": slurm_placement, "mpi": _mpi}
    if launcher not in readers:
        raise DistributedError(
            f"unknown launcher {launcher!r}{did_you_mean(launcher, LAUNCHERS)}; "
            f"use one of {', '.join(readers)}"
        )
    placement = readers[launcher](environ, str(port) if port else None)
    if placement.rank >= placement.world_size:
        raise DistributedError(
            f"{placement.describe('RANK')} must be less than {placement.describe('WORLD_SIZE')}; ranks start at 0, and "
            "the world size is the total number of processes on all machines"
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
            f"launcher '{launcher}' requires the environment variable {name}, which is not set; "
            "check that this launcher started the program"
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


def first_set(environ: Mapping[str, str], *names: str) -> str:
    """Return the first name in `names` that is set in `environ`, or `names[0]` if none is set."""
    return next((name for name in names if environ.get(name)), names[0])


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


def _mpi(environ: Mapping[str, str], port: str | None) -> Placement:
    families = [family for family in _MPI_FAMILIES if environ.get(family[0])]
    if not families:
        names = ", ".join(family[0] for family in _MPI_FAMILIES)
        raise DistributedError(
            f"launcher 'mpi' requires one of {names}, but none of them is set; start the program with mpirun"
        )
    rank, size, local_rank, local_size = families[0]
    world = read_int(environ, size, "mpi")
    local = read_int(environ, local_size, "mpi") if environ.get(local_size) else None
    return Placement(
        rank=read_int(environ, rank, "mpi"),
        local_rank=read_int(environ, local_rank, "mpi"),
        world_size=world,
        master_addr=environ.get("MASTER_ADDR") or _mpi_master(world, local, local_size),
        master_port=port or _mpi_port(environ),
        local_size=local,
        sources={"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size},
    )


def _mpi_master(world: int, local: int | None, local_size: str) -> str:
    if local == world:
        return "127.0.0.1"
    count = f"{local_size} is not set" if local is None else f"{local_size}={local}"
    raise DistributedError(
        f"launcher 'mpi' requires the environment variable MASTER_ADDR unless all {world} processes run on this "
        f"machine ({count}). Set MASTER_ADDR to the host of rank 0 with `mpirun -x MASTER_ADDR=host` (Open "
        "MPI) or `mpiexec -genv MASTER_ADDR host` (MPICH, Intel MPI)"
    )


def _mpi_port(environ: Mapping[str, str]) -> str:
    if environ.get("MASTER_PORT"):
        return str(read_int(environ, "MASTER_PORT", "mpi"))
    # Two jobs on one machine need different ports. Open MPI sets a variable that identifies the job; Hydra does not.
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    if not job:
        return DEFAULT_PORT
    return str(20000 + zlib.crc32(job.encode()) % 10000)
