"""Rank, world size and backend of the process group, and the local rank and size on this machine."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist

from slipstream.errors import DistributedError

__all__ = [
    "barrier", "flag_device", "get_backend", "get_comm_device", "get_default_group", "get_dist_info",
    "get_local_group", "get_local_rank", "get_local_size", "get_rank", "get_world_size", "init_local_group",
    "is_distributed", "is_main_process", "master_only",
]  # fmt: skip

P = ParamSpec("P")
R = TypeVar("R")

# A process has one local group, just as it has one default group, which torch stores.
_local_group: dist.ProcessGroup | None = None


def is_distributed() -> bool:
    """Return whether a default process group exists."""
    return dist.is_available() and dist.is_initialized()


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """Return the rank of this process, or 0 if there is no process group."""
    return dist.get_rank(group) if is_distributed() else 0


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of processes, or 1 if there is no process group."""
    return dist.get_world_size(group) if is_distributed() else 1


def get_dist_info(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Return `(rank, world_size)`."""
    return get_rank(group), get_world_size(group)


def get_local_rank() -> int:
    """Return the rank of this process among the processes on this machine, or 0 if there is no process group.

    The launcher exports this rank as `LOCAL_RANK`.
    """
    return int(os.environ.get("LOCAL_RANK", 0)) if is_distributed() else 0


def get_local_size() -> int:
    """Return the number of processes on this machine, or 1 if there is no process group.

    Raises:
        DistributedError: the launcher did not export `LOCAL_WORLD_SIZE`, and `init_local_group` was not called.
    """
    if not is_distributed():
        return 1
    if _local_group is not None:
        return dist.get_world_size(_local_group)
    if "LOCAL_WORLD_SIZE" not in os.environ:
        raise DistributedError(
            "the environment variable LOCAL_WORLD_SIZE is not set; set it to the number of processes on "
            "this machine, or call init_local_group"
        )
    return int(os.environ["LOCAL_WORLD_SIZE"])


def init_local_group(node_rank: int, num_gpus_per_node: int) -> None:
    """Create one process group for each machine; every process must call this function.

    Args:
        node_rank: index of this machine.
        num_gpus_per_node: number of processes on each machine. The first rank of machine n is
            `n * num_gpus_per_node`.
    """
    global _local_group
    if not is_distributed():
        return
    # new_group is collective: every process creates the groups of all machines in the same order.
    for first in range(0, get_world_size(), num_gpus_per_node):
        last = min(first + num_gpus_per_node, get_world_size())
        group = dist.new_group(list(range(first, last)))
        if first == node_rank * num_gpus_per_node:
            _local_group = group


def get_local_group() -> dist.ProcessGroup | None:
    """Return the group of the processes on this machine, or None if there is no process group.

    Raises:
        DistributedError: `init_local_group` was not called.
    """
    if not is_distributed():
        return None
    if _local_group is None:
        raise DistributedError("the local group does not exist; call init_local_group on every rank first")
    return _local_group


def get_default_group() -> dist.ProcessGroup | None:
    """Return the group of all processes, or None if there is no process group."""
    return dist.group.WORLD if is_distributed() else None


def get_backend(group: dist.ProcessGroup | None = None) -> str | None:
    """Return the name of the backend (such as `gloo`, `nccl` or `hccl`), or None if there is no process group.

    If the group has one backend for each device type (`cpu:gloo,cuda:nccl`), the accelerator's backend is returned.
    """
    if not is_distributed():
        return None
    backends = dict(pair.rpartition(":")[::2] for pair in str(dist.get_backend(group)).split(","))
    return next((name for device, name in backends.items() if device != "cpu"), backends.get("cpu"))


def get_comm_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device of the tensors that the backend transfers: the accelerator, or the CPU for gloo and MPI."""
    if get_backend(group) in (None, "gloo", "mpi"):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def flag_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the CPU if the group has a CPU backend, or else the device from `get_comm_device`.

    Use this device for small values that the host reads, because reading a value from the accelerator causes a device
    synchronization.
    """
    return torch.device("cpu") if "cpu:" in dist.get_backend_config(group) else get_comm_device(group)


def is_main_process(group: dist.ProcessGroup | None = None) -> bool:
    """Return whether this process is rank 0."""
    return get_rank(group) == 0


def master_only(func: Callable[P, R]) -> Callable[P, R | None]:
    """Decorate `func` so that it runs only on rank 0 and returns None on other ranks."""

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return func(*args, **kwargs) if is_main_process() else None

    return wrapper


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait for all processes; do nothing if there is no process group."""
    if is_distributed():
        dist.barrier(group)
