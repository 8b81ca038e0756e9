"""Join the processes that a launcher started: torchrun, Slurm or MPI."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from slipstream.dist.info import is_distributed
from slipstream.errors import DistributedError, did_you_mean

__all__ = ["LAUNCHERS", "Launcher", "Placement", "first_host", "init_dist", "placement"]

Launcher = Literal["none", "pytorch", "slurm", "mpi"]
LAUNCHERS: tuple[Launcher, ...] = ("none", "pytorch", "slurm", "mpi")
DEFAULT_PORT = "29500"
_BACKENDS = {"cuda": "nccl", "npu": "hccl", "xpu": "xccl"}


@dataclass(frozen=True)
class Placement:
    """Where this process stands in the job, and where rank 0 listens."""

    rank: int
    local_rank: int
    world_size: int
    master_addr: str
    master_port: str


def placement(launcher: str, environ: dict[str, str], port: int | str | None = None) -> Placement:
    """Read this process's placement from the variables that `launcher` sets.

    Raises:
        DistributedError: a variable is missing or no number; the error names it and the launcher.
    """
    readers = {"pytorch": _torchrun, "slurm": _slurm, "mpi": _mpi}
    if launcher not in readers:
        raise DistributedError(f"unknown launcher {launcher!r}{did_you_mean(launcher, LAUNCHERS)}")
    return readers[launcher](environ, str(port) if port else None)


def init_dist(launcher: str, backend: str | None = None, **kwargs: Any) -> None:
    """Initialise the default process group and select this process's device.

    Args:
        launcher: `pytorch`, `slurm` or `mpi`.
        backend: by default the device's own: nccl (CUDA), hccl (NPU), xccl (XPU), gloo (CPU).
        kwargs: `timeout` in seconds, `port`, and anything `torch.distributed.init_process_group` takes.
    """
    if is_distributed():
        return
    here = placement(launcher, dict(os.environ), kwargs.pop("port", None))
    os.environ.update(
        RANK=str(here.rank),
        LOCAL_RANK=str(here.local_rank),
        WORLD_SIZE=str(here.world_size),
        MASTER_ADDR=here.master_addr,
        MASTER_PORT=here.master_port,
    )
    # A build for CUDA names it even on a machine without a GPU, unless asked to check.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        torch.accelerator.set_device_index(here.local_rank % torch.accelerator.device_count())
    if "timeout" in kwargs and not isinstance(kwargs["timeout"], timedelta):
        kwargs["timeout"] = timedelta(seconds=kwargs["timeout"])
    default = _BACKENDS.get(accelerator.type, "gloo") if accelerator else "gloo"
    dist.init_process_group(backend or default, rank=here.rank, world_size=here.world_size, **kwargs)


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list: `n[03-07,9],gpu1` gives `n03`.

    `scontrol` is asked where it is installed, since only it knows every form of a list.
    """
    try:
        shown = subprocess.run(
            ["scontrol", "show", "hostname", nodelist], capture_output=True, text=True, check=True
        )
        return shown.stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return re.sub(r"\[(\w+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", nodelist)[0])


def _torchrun(environ: dict[str, str], port: str | None) -> Placement:
    return Placement(
        rank=_number(environ, "RANK", "pytorch"),
        local_rank=_number(environ, "LOCAL_RANK", "pytorch"),
        world_size=_number(environ, "WORLD_SIZE", "pytorch"),
        master_addr=_text(environ, "MASTER_ADDR", "pytorch"),
        master_port=port or str(_number(environ, "MASTER_PORT", "pytorch")),
    )


def _slurm(environ: dict[str, str], port: str | None) -> Placement:
    address = environ.get("MASTER_ADDR") or first_host(_text(environ, "SLURM_NODELIST", "slurm"))
    return Placement(
        rank=_number(environ, "SLURM_PROCID", "slurm"),
        local_rank=_number(environ, "SLURM_LOCALID", "slurm"),
        world_size=_number(environ, "SLURM_NTASKS", "slurm"),
        master_addr=address,
        master_port=port or str(_number({"MASTER_PORT": DEFAULT_PORT} | environ, "MASTER_PORT", "slurm")),
    )


def _mpi(environ: dict[str, str], port: str | None) -> Placement:
    return Placement(
        rank=_number(environ, "OMPI_COMM_WORLD_RANK", "mpi"),
        local_rank=_number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", "mpi"),
        world_size=_number(environ, "OMPI_COMM_WORLD_SIZE", "mpi"),
        master_addr=_text(environ, "MASTER_ADDR", "mpi"),
        master_port=port or str(_number({"MASTER_PORT": DEFAULT_PORT} | environ, "MASTER_PORT", "mpi")),
    )


def _text(environ: dict[str, str], name: str, launcher: str) -> str:
    if not environ.get(name):
        raise DistributedError(
            f"launcher '{launcher}' needs the environment variable {name}, which is not set: "
            "was the program started by that launcher?"
        )
    return environ[name]


def _number(environ: dict[str, str], name: str, launcher: str) -> int:
    text = _text(environ, name, launcher)
    if not text.isdigit():
        raise DistributedError(f"the environment variable {name} must be a number, not {text!r}")
    return int(text)
