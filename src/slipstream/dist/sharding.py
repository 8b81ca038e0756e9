"""Tensors whose parts lie on several processes (torch's `DTensor`), told from plain ones without importing them.

`torch.distributed.tensor` takes most of a second to import, and only runs that shard a model need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["is_sharded", "largest", "local", "mesh_of", "placements_on", "shard_like", "whole"]


def is_sharded(tensor: Any) -> bool:
    """Say whether `tensor` is a `DTensor`."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "device_mesh")


def mesh_of(module: nn.Module) -> DeviceMesh | None:
    """Return the mesh over which a module's parameters are sharded, or None if they are plain tensors."""
    sharded: Any = next((param for param in module.parameters() if is_sharded(param)), None)
    return None if sharded is None else sharded.device_mesh


def placements_on(mesh: DeviceMesh) -> tuple[Any, ...]:
    """Return how `fully_shard` lays tensors out on a mesh: sharded by rows over its last dimension."""
    from torch.distributed.tensor import Replicate, Shard

    return (*(Replicate() for _ in range(mesh.ndim - 1)), Shard(0))


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, which shares its memory; a plain tensor is returned as it is."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():  # with gradient it would be a view in the graph, not the part itself
        part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor on every process (a collective call for a sharded one), detached."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return full.detach()


def largest(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute value in sharded tensors, the same 0-dim tensor on all processes.

    A process may hold no row of some of them, or of any; torch's own infinity norm fails there.
    """
    parts = [part for part in map(local, tensors) if part.numel()]
    found = torch.zeros((), dtype=tensors[0].dtype, device=local(tensors[0]).device)
    if parts:
        found = torch.stack(torch._foreach_norm(parts, float("inf"))).max().to(found)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found


def shard_like(value: Any, own: Any) -> Any:
    """Return `value` laid out as `own`, if that is sharded and has the same shape; else as it is.

    Every process holds the whole `value` and keeps its part of it: nothing is sent.
    """
    if not is_sharded(own) or not isinstance(value, Tensor) or is_sharded(value) or value.shape != own.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.detach(), own.device_mesh, own.placements, src_data_rank=None)
