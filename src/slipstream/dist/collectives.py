"""Collectives for tensors, named as in MMEngine, that also work without a process group.

`src` and `dst` are global ranks, as in torch. Tensors with different shapes on different ranks cause wrong results or
a broken connection. Therefore, if the group has a CPU backend, the ranks first compare the shapes and dtypes of their
tensors. This requires one small collective and does not cause a device synchronization.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.dist.info import flag_device, get_comm_device, get_rank, get_world_size
from slipstream.errors import DistributedError

__all__ = [
    "all_gather", "all_reduce", "all_reduce_dict", "all_reduce_params", "broadcast", "gather",
    "traceable_sum",
]  # fmt: skip

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def all_reduce(data: Tensor, op: str = "sum", group: dist.ProcessGroup | None = None) -> None:
    """Reduce `data` over all processes in place.

    Args:
        data: tensor of any shape. The mean of integers is rounded toward zero. For bool tensors, sum and max
            compute a logical OR; product and min compute a logical AND.
        op: sum, mean, max, min or product.
        group: process group; the default group if None.

    Raises:
        DistributedError: `op` is unknown, `op` is mean and `data` is bool, or shapes or dtypes differ between ranks.
    """
    _check_op(op, [data])
    if get_world_size(group) > 1:
        _check_agreement("all_reduce", (op, _signature(data)), group)
        _reduce(data.detach(), op, group)


def traceable_sum(data: Tensor) -> Tensor:
    """Return the sum of `data` over all processes of the default group, which must exist.

    Unlike `all_reduce`, this function is differentiable, and `torch.compile(fullgraph=True)` can trace it.
    """
    # Import here, because this import is slow and a run with a single process does not need it.
    from torch.distributed import _functional_collectives

    return _functional_collectives.all_reduce(data, "sum", cast("dist.ProcessGroup", dist.group.WORLD))


def all_reduce_dict(data: dict[str, Tensor], op: str = "sum", group: dist.ProcessGroup | None = None) -> None:
    """Reduce every tensor in `data` like `all_reduce`, with one all-reduce for each dtype and device type.

    The tensors in the dict are replaced by new tensors; the original tensors are not modified.
    """
    _check_op(op, data.values())
    if get_world_size(group) > 1:
        keys = sorted(data)
        _check_agreement("all_reduce_dict", (op, [(key, _signature(data[key])) for key in keys]), group)
        data.update((key, data[key].detach().clone()) for key in keys)
        _reduce_buckets([data[key] for key in keys], op, group)


def all_reduce_params(
    params: Iterable[Tensor],
    coalesce: bool = True,
    bucket_size_mb: float = -1,
    op: str = "sum",
    group: dist.ProcessGroup | None = None,
) -> None:
    """Reduce parameters or buffers in place, like `all_reduce`.

    Args:
        params: the same tensors in the same order on every rank.
        coalesce: whether to copy the tensors into flat buckets before the reduction. This is faster than reducing
            the tensors one by one, but requires memory for the copies.
        bucket_size_mb: size of a bucket in MiB; -1 puts all tensors with the same dtype and device type into one
            bucket.
        op: sum, mean, max, min or product.
        group: process group; the default group if None.
    """
    tensors = [param.detach() for param in params]
    _check_op(op, tensors)
    if get_world_size(group) > 1:
        _check_agreement("all_reduce_params", (op, [_signature(tensor) for tensor in tensors]), group)
        _reduce_buckets(tensors, op, group, (bucket_size_mb if coalesce else 0) * 2**20)


def all_gather(data: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Return the list of tensors from all ranks, in rank order and on the device of `data`.

    Raises:
        DistributedError: shapes or dtypes differ between ranks.
    """
    world = get_world_size(group)
    if world == 1:
        return [data]
    _check_agreement("all_gather", _signature(data), group)
    sent = _bytes(data, group)
    received = [torch.empty_like(sent) for _ in range(world)]
    dist.all_gather(received, sent, group)
    return [_restore(part, data) for part in received]


def gather(data: Tensor, dst: int = 0, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """On rank `dst`, return the tensors from all ranks in rank order; on other ranks, return an empty list."""
    world = get_world_size(group)
    if world == 1:
        return [data]
    _check_agreement("gather", (dst, _signature(data)), group)
    sent = _bytes(data, group)
    received = [torch.empty_like(sent) for _ in range(world)] if get_rank() == dst else None
    dist.gather(sent, received, dst, group)
    return [_restore(part, data) for part in received or []]


def broadcast(data: Tensor, src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite `data` in place with the tensor from rank `src`."""
    if get_world_size(group) > 1:
        _check_agreement("broadcast", (src, _signature(data)), group)
        sent = _bytes(data, group)
        dist.broadcast(sent, src, group)
        data.detach().copy_(_restore(sent, data))


def _check_op(op: str, tensors: Iterable[Tensor]) -> None:
    if op not in _OPS:
        raise DistributedError(f"all_reduce supports {', '.join(_OPS)}, not {op!r}")
    if op == "mean" and any(tensor.dtype is torch.bool for tensor in tensors):
        raise DistributedError(
            "all_reduce does not support the mean of bool tensors; reduce data.float() instead"
        )


def _reduce(data: Tensor, op: str, group: dist.ProcessGroup | None) -> None:
    is_integral = not (data.is_floating_point() or data.is_complex())
    # Gloo does not support int16, and support for bool differs between backends, so both are reduced as int64. A mean
    # is computed from a sum, which must not overflow.
    is_small = data.dtype in (torch.bool, torch.int16)
    dtype = torch.int64 if is_integral and (is_small or op == "mean") else data.dtype
    moved = data.to(_device(data, group), dtype).contiguous()
    dist.all_reduce(moved, _OPS[op], group)
    if op == "mean":
        moved.div_(get_world_size(group), rounding_mode="trunc" if is_integral else None)
    if moved is not data:
        data.copy_(moved)


def _reduce_buckets(
    tensors: list[Tensor], op: str, group: dist.ProcessGroup | None, limit: float = -1
) -> None:
    """Reduce tensors in place, in buckets with a single dtype and device type.

    A bucket contains at most `limit` bytes, or a single larger tensor. A negative limit means no limit.
    """
    buckets: list[list[Tensor]] = []
    kinds: dict[tuple[torch.dtype, str], tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        kind = tensor.dtype, tensor.device.type
        bucket, size = kinds.get(kind, ([], 0))
        if not bucket or 0 <= limit < size + tensor.nbytes:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(tensor)
        kinds[kind] = bucket, size + tensor.nbytes
    for bucket in buckets:
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        _reduce(flat, op, group)
        for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def _device(data: Tensor, group: dist.ProcessGroup | None) -> torch.device:
    if f"{data.device.type}:" in str(dist.get_backend(group)):
        return data.device
    return get_comm_device(group)


def _bytes(data: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return `data` as a flat uint8 tensor on the group's device, because backends do not support every dtype."""
    return data.detach().to(_device(data, group)).contiguous().view(-1).view(torch.uint8)


def _restore(sent: Tensor, data: Tensor) -> Tensor:
    return sent.view(data.dtype).view(data.shape).to(data.device)


def _signature(data: Tensor) -> tuple[list[int], str]:
    return list(data.shape), str(data.dtype).removeprefix("torch.")


def _check_agreement(function: str, signature: Any, group: dist.ProcessGroup | None) -> None:
    """Raise a `DistributedError` on every rank if the ranks' calls differ in function, options, shapes or dtypes."""
    if flag_device(group).type != "cpu":
        return
    digest = hashlib.blake2b(repr((function, signature)).encode(), digest_size=7).digest()
    value = int.from_bytes(digest, "little")
    bounds = torch.tensor([value, -value])
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group)
    largest, smallest = bounds.tolist()
    if largest != -smallest:
        raise DistributedError(
            f"{function}: every rank must call the same function with the same options, shapes and dtypes, but rank "
            f"{get_rank(group)} called {function}({str(signature)[:300]}), and another rank did not"
        )
