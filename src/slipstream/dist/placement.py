"""Where a process stands in its job, read from the variables that its launcher sets."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from slipstream.errors import DistributedError, did_you_mean

__all__ = ["LAUNCHERS", "Launcher", "Placement", "first_set", "infer_launcher", "number", "placement", "text"]

Launcher = Literal["none", "pytorch", "slurm", "mpi"]
LAUNCHERS: tuple[Launcher, ...] = ("none", "pytorch", "slurm", "mpi")
DEFAULT_PORT = "29500"
# rank, world size, local rank and local size: Open MPI; MVAPICH2; MPICH, Intel MPI and others with Hydra
_MPI_FAMILIES = (
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    tuple(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


@dataclass(frozen=True)
class Placement:
    """Where this process stands in the job, and where rank 0 listens."""

    rank: int
    local_rank: int
    world_size: int
    master_addr: str
    master_port: str
    local_size: int | None = None
    """Processes on this machine; None if the launcher does not say."""
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    """From which of the launcher's variables RANK, WORLD_SIZE, ... were read."""

    def named(self, name: str) -> str:
        """Return `"WORLD_SIZE=4 (from SLURM_NTASKS)"`: torch's variable, its value and where that is from."""
        value = self.environ()[name]
        source = self.sources.get(name, name)
        return f"{name}={value}" if source == name else f"{name}={value} (from {source})"

    def environ(self) -> dict[str, str]:
        """Return the variables that torch, and what else runs in this process, reads."""
        values = {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
        }
        return values if self.local_size is None else {**values, "LOCAL_WORLD_SIZE": str(self.local_size)}


def placement(launcher: str, environ: Mapping[str, str], port: int | str | None = None) -> Placement:
    """Read this process's placement from the variables that `launcher` sets.

    Raises:
        DistributedError: a variable is missing or no number, or the rank is not below the world size; the
            error names the variable and the launcher.
    """
    from slipstream.dist.slurm import slurm_placement

    readers = {"pytorch": _torchrun, "slurm": slurm_placement, "mpi": _mpi}
    if launcher not in readers:
        raise DistributedError(f"unknown launcher {launcher!r}{did_you_mean(launcher, LAUNCHERS)}")
    here = readers[launcher](environ, str(port) if port else None)
    if here.rank >= here.world_size:
        raise DistributedError(
            f"{here.named('RANK')} is not below {here.named('WORLD_SIZE')}: ranks count from 0, and the world "
            "size is the number of all processes on all machines"
        )
    return here


def infer_launcher(environ: Mapping[str, str] | None = None) -> Launcher:
    """Return the launcher that started this process, by its variables; `none` if there was none."""
    environ = os.environ if environ is None else environ
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return "pytorch"
    # mpirun inside a Slurm job passes Slurm's variables on; srun sets PMI_RANK too, but no local rank.
    if any(rank in environ and local in environ for rank, _, local, _ in _MPI_FAMILIES):
        return "mpi"
    return "slurm" if "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ else "none"


def text(environ: Mapping[str, str], name: str, launcher: str) -> str:
    """Return a variable that the launcher must have set."""
    if not environ.get(name):
        raise DistributedError(
            f"launcher '{launcher}' needs the environment variable {name}, which is not set: "
            "was the program started by that launcher?"
        )
    return environ[name]


def number(environ: Mapping[str, str], name: str, launcher: str) -> int:
    """Return a variable that must be a number, 0 or more."""
    value = text(environ, name, launcher)
    if not value.isdecimal():
        raise DistributedError(f"the environment variable {name} must be a number, not {value!r}")
    return int(value)


def first_set(environ: Mapping[str, str], *names: str) -> str:
    """Return the first of `names` that is set; the first of all if none is, for the error to name."""
    return next((name for name in names if environ.get(name)), names[0])


def _torchrun(environ: Mapping[str, str], port: str | None) -> Placement:
    local = environ.get("LOCAL_WORLD_SIZE")
    return Placement(
        rank=number(environ, "RANK", "pytorch"),
        local_rank=number(environ, "LOCAL_RANK", "pytorch"),
        world_size=number(environ, "WORLD_SIZE", "pytorch"),
        master_addr=text(environ, "MASTER_ADDR", "pytorch"),
        master_port=port or str(number(environ, "MASTER_PORT", "pytorch")),
        local_size=number(environ, "LOCAL_WORLD_SIZE", "pytorch") if local else None,
    )


def _mpi(environ: Mapping[str, str], port: str | None) -> Placement:
    families = [family for family in _MPI_FAMILIES if environ.get(family[0])]
    if not families:
        names = ", ".join(family[0] for family in _MPI_FAMILIES)
        raise DistributedError(f"launcher 'mpi' finds none of {names}: was the program started by mpirun?")
    rank, size, local_rank, local_size = families[0]
    world = number(environ, size, "mpi")
    beside = number(environ, local_size, "mpi") if environ.get(local_size) else None
    return Placement(
        rank=number(environ, rank, "mpi"),
        local_rank=number(environ, local_rank, "mpi"),
        world_size=world,
        master_addr=environ.get("MASTER_ADDR") or _mpi_master(world, beside, local_size),
        master_port=port or _mpi_port(environ),
        local_size=beside,
        sources={"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size},
    )


def _mpi_master(world: int, beside: int | None, local_size: str) -> str:
    if beside == world:
        return "127.0.0.1"
    raise DistributedError(
        f"launcher 'mpi' needs the environment variable MASTER_ADDR, which is not set, since only {local_size}="
        f"{beside} of {world} processes are on this machine: give the host of rank 0, with `mpirun -x "
        "MASTER_ADDR=host` (Open MPI) or `mpiexec -genv MASTER_ADDR host` (MPICH, Intel MPI)"
    )


def _mpi_port(environ: Mapping[str, str]) -> str:
    if environ.get("MASTER_PORT"):
        return str(number(environ, "MASTER_PORT", "mpi"))
    # Two jobs on one machine should not meet. Open MPI names a job; Hydra sets nothing that tells jobs apart.
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    if not job:
        return DEFAULT_PORT
    return str(20000 + zlib.crc32(job.encode()) % 10000)
