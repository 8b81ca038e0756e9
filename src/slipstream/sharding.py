"""Helpers for sharded tensors (`DTensor`).

`torch.distributed.tensor` is imported only if a model is sharded, because this import takes almost a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def is_sharded(tensor: Any) -> bool:
    """Return whether `tensor` is a `DTensor`."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "device_mesh")


def mesh_of(module: nn.Module) -> DeviceMesh | None:
    """Return the mesh over which a module's parameters are sharded, or None if all parameters are plain tensors."""
    sharded: Any = next((param for param in module.parameters() if is_sharded(param)), None)
    return None if sharded is None else sharded.device_mesh


def placements_on(mesh: DeviceMesh) -> tuple[Any, ...]:
    """Return `fully_shard`'s placements on a mesh: `Shard(0)` for its last dimension, `Replicate()` for all others."""
    from torch.distributed.tensor import Replicate, Shard

    return (*(Replicate() for _ in range(mesh.ndim - 1)), Shard(0))


def local_shard(tensor: Tensor) -> Tensor:
    """Return the local shard of a sharded tensor, without a copy; plain tensors are returned unchanged."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():  # with gradients enabled, `to_local` returns a view in the autograd graph
        shard: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return shard


def with_local(tensor: Tensor, shard: Tensor) -> Tensor:
    """Return a tensor that is sharded like `tensor`, with a different local shard."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        shard,
        tensor.device_mesh,  # type: ignore[attr-defined]
        tensor.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor, detached, on every process; this call is collective for a sharded tensor."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return full.detach()


def max_abs(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute value in sharded tensors as a 0-dim tensor, the same on all processes.

    A process may have an empty shard of some or all tensors; torch's infinity norm fails for empty tensors.
    """
    shards = [shard for shard in map(local_shard, tensors) if shard.numel()]
    result = torch.zeros((), dtype=tensors[0].dtype, device=local_shard(tensors[0]).device)
    if shards:
        result = torch.stack(torch._foreach_norm(shards, float("inf"))).max().to(result)
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return result


def shard_like(value: Any, template: Any) -> Any:
    """Shard `value` like `template` if `template` is sharded and has the same shape; otherwise return it unchanged.

    Every process passes the full `value` and keeps its shard, without communication.
    """
    if (
        not is_sharded(template)
        or not isinstance(value, Tensor)
        or is_sharded(value)
        or value.shape != template.shape
    ):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.detach(), template.device_mesh, template.placements, src_data_rank=None)
