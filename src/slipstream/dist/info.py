"""Who takes part: rank, world size and backend of the default process group."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist

__all__ = [
    "barrier",
    "get_backend",
    "get_comm_device",
    "get_dist_info",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "is_distributed",
    "is_main_process",
    "master_only",
]

P = ParamSpec("P")
R = TypeVar("R")


def is_distributed() -> bool:
    """Say whether a default process group exists."""
    return dist.is_available() and dist.is_initialized()


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """Return this process's rank, 0 without a process group."""
    return dist.get_rank(group) if is_distributed() else 0


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of processes, 1 without a process group."""
    return dist.get_world_size(group) if is_distributed() else 1


def get_dist_info(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Return `(rank, world_size)`."""
    return get_rank(group), get_world_size(group)


def get_local_rank() -> int:
    """Return the rank among the processes of this machine, which the launcher exported; 0 without one."""
    return int(os.environ.get("LOCAL_RANK", 0)) if is_distributed() else 0


def get_backend(group: dist.ProcessGroup | None = None) -> str | None:
    """Return the backend's name (`gloo`, `nccl`, `hccl`), None without a process group."""
    return str(dist.get_backend(group)) if is_distributed() else None


def get_comm_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device on which the backend moves tensors: the accelerator, or the CPU for gloo and MPI."""
    if get_backend(group) in (None, "gloo", "mpi"):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator if accelerator is not None else torch.device("cpu")


def is_main_process(group: dist.ProcessGroup | None = None) -> bool:
    """Say whether this is rank 0."""
    return get_rank(group) == 0


def master_only(func: Callable[P, R]) -> Callable[P, R | None]:
    """Run `func` on rank 0 alone; elsewhere it returns None."""

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return func(*args, **kwargs) if is_main_process() else None

    return wrapper


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait for every process; nothing to do without a process group."""
    if is_distributed():
        dist.barrier(group)
