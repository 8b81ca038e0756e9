"""Collectives that also work without a process group, by MMEngine's names."""

from __future__ import annotations

from itertools import chain, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.dist.info import get_comm_device, get_rank, get_world_size
from slipstream.errors import DistributedError

__all__ = [
    "all_gather_object",
    "all_reduce",
    "broadcast",
    "broadcast_object_list",
    "collect_results",
    "sync_random_seed",
]

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def all_reduce(data: Tensor, op: str = "sum", group: dist.ProcessGroup | None = None) -> None:
    """Reduce `data` over all processes in place; `op` is sum, mean, max, min or product."""
    if op not in _OPS:
        raise DistributedError(f"all_reduce knows {', '.join(_OPS)}, not {op!r}")
    if get_world_size(group) == 1:
        return
    moved = data.to(get_comm_device(group))
    dist.all_reduce(moved, _OPS[op], group)
    if op == "mean":
        moved = moved / get_world_size(group)
    if moved is not data:
        data.copy_(moved)


def broadcast(data: Tensor, src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite `data` with that of rank `src`, in place."""
    if get_world_size(group) == 1:
        return
    moved = data.to(get_comm_device(group))
    dist.broadcast(moved, src, group)
    if moved is not data:
        data.copy_(moved)


def all_gather_object(data: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the objects of all ranks, in rank order, on every rank."""
    size = get_world_size(group)
    if size == 1:
        return [data]
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, data, group)
    return gathered


def broadcast_object_list(data: list[Any], src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite the elements of `data` with those of rank `src`, in place."""
    if get_world_size(group) > 1:
        dist.broadcast_object_list(data, src, group)


def collect_results(
    results: list[Any], size: int, device: str = "cpu", tmpdir: str | None = None
) -> list[Any] | None:
    """Return the results of all ranks in the order of the samples, on rank 0; None elsewhere.

    Rank r holds samples r, r + world_size, ...: the parts are interleaved, and cut to `size` so that a
    sample which a sampler repeated to even out the parts counts once. `device` and `tmpdir` are accepted
    for MMEngine's callers; the process group moves the objects.
    """
    world = get_world_size()
    if world == 1:
        return results[:size]
    parts: list[Any] | None = [None] * world if get_rank() == 0 else None
    dist.gather_object(results, parts, dst=0)
    if parts is None:
        return None
    missing = object()
    ordered = chain.from_iterable(zip_longest(*parts, fillvalue=missing))
    return [result for result in ordered if result is not missing][:size]


def sync_random_seed(group: dist.ProcessGroup | None = None) -> int:
    """Return one random seed, the same on every rank."""
    seed = [int(torch.randint(0, 2**31 - 1, (1,), generator=_entropy()))]
    broadcast_object_list(seed, 0, group)
    return int(seed[0])


def _entropy() -> torch.Generator:
    generator = torch.Generator()
    generator.seed()  # from the operating system: a fresh seed must not depend on the global generator
    return generator
