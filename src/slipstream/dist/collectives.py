"""Collectives on tensors, by MMEngine's names; they also work without a process group.

`src` and `dst` are ranks of the default group, as torch has them. Tensors that differ in shape between the
ranks would give wrong numbers or a broken connection, so the ranks first compare what they brought, wherever
the group has a backend for the CPU: one small message, and no wait for the accelerator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.dist.info import flag_device, get_comm_device, get_rank, get_world_size
from slipstream.errors import DistributedError

__all__ = ["all_gather", "all_reduce", "all_reduce_dict", "all_reduce_params", "broadcast", "gather"]

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
        data: any shape. The mean of integers is rounded toward zero; for bool, sum and max say whether any
            is true, product and min whether all are.
        op: sum, mean, max, min or product.
        group: the default group unless given.

    Raises:
        DistributedError: unknown `op`, the mean of bool, or another shape or dtype on another rank.
    """
    _check_op(op, [data])
    if get_world_size(group) > 1:
        _agree("all_reduce", (op, _facts(data)), group)
        _reduce(data.detach(), op, group)


def all_reduce_dict(data: dict[str, Tensor], op: str = "sum", group: dist.ProcessGroup | None = None) -> None:
    """Reduce every tensor of `data` as `all_reduce` does, with one message for each dtype.

    The dict gets new tensors of the same shapes and dtypes; those it held stay as they are.
    """
    _check_op(op, data.values())
    if get_world_size(group) > 1:
        keys = sorted(data)
        _agree("all_reduce_dict", (op, [(key, _facts(data[key])) for key in keys]), group)
        data.update((key, data[key].detach().clone()) for key in keys)
        _reduce_together([data[key] for key in keys], op, group)


def all_reduce_params(
    params: Iterable[Tensor],
    coalesce: bool = True,
    bucket_size_mb: float = -1,
    op: str = "sum",
    group: dist.ProcessGroup | None = None,
) -> None:
    """Reduce parameters or buffers in place, as `all_reduce` does.

    Args:
        params: the same ones in the same order on every rank.
        coalesce: send them together, which is faster and needs as much memory again; else one by one.
        bucket_size_mb: MiB that are sent together; -1 for all of one dtype.
        op: sum, mean, max, min or product.
        group: the default group unless given.
    """
    tensors = [param.detach() for param in params]
    _check_op(op, tensors)
    if get_world_size(group) > 1:
        _agree("all_reduce_params", (op, [_facts(tensor) for tensor in tensors]), group)
        _reduce_together(tensors, op, group, (bucket_size_mb if coalesce else 0) * 2**20)


def all_gather(data: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Return the tensors of all ranks, in rank order, on every rank and on the device of `data`.

    Raises:
        DistributedError: another shape or dtype on another rank.
    """
    world = get_world_size(group)
    if world == 1:
        return [data]
    _agree("all_gather", _facts(data), group)
    sent = _bytes(data, group)
    received = [torch.empty_like(sent) for _ in range(world)]
    dist.all_gather(received, sent, group)
    return [_restore(part, data) for part in received]


def gather(data: Tensor, dst: int = 0, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Return the tensors of all ranks, in rank order, on rank `dst`; an empty list elsewhere."""
    world = get_world_size(group)
    if world == 1:
        return [data]
    _agree("gather", (dst, _facts(data)), group)
    sent = _bytes(data, group)
    received = [torch.empty_like(sent) for _ in range(world)] if get_rank() == dst else None
    dist.gather(sent, received, dst, group)
    return [_restore(part, data) for part in received or []]


def broadcast(data: Tensor, src: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite `data` with that of rank `src`, in place."""
    if get_world_size(group) > 1:
        _agree("broadcast", (src, _facts(data)), group)
        sent = _bytes(data, group)
        dist.broadcast(sent, src, group)
        data.detach().copy_(_restore(sent, data))


def _check_op(op: str, tensors: Iterable[Tensor]) -> None:
    if op not in _OPS:
        raise DistributedError(f"all_reduce knows {', '.join(_OPS)}, not {op!r}")
    if op == "mean" and any(tensor.dtype is torch.bool for tensor in tensors):
        raise DistributedError("the mean of bool tensors is no bool: reduce data.float()")


def _reduce(data: Tensor, op: str, group: dist.ProcessGroup | None) -> None:
    whole = not (data.is_floating_point() or data.is_complex())
    # No backend reduces bool and int16, and the sum behind a mean must not run over.
    small = data.dtype in (torch.bool, torch.int16)
    dtype = torch.int64 if whole and (small or op == "mean") else data.dtype
    moved = data.to(_device(data, group), dtype).contiguous()
    dist.all_reduce(moved, _OPS[op], group)
    if op == "mean":
        moved.div_(get_world_size(group), rounding_mode="trunc" if whole else None)
    if moved is not data:
        data.copy_(moved)


def _reduce_together(
    tensors: list[Tensor], op: str, group: dist.ProcessGroup | None, limit: float = -1
) -> None:
    """Reduce in place in buckets of one dtype and device and at most `limit` bytes, if not negative."""
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
    """Return `data` as a flat uint8 tensor on the group's device: backends do not know every dtype."""
    return data.detach().to(_device(data, group)).contiguous().view(-1).view(torch.uint8)


def _restore(sent: Tensor, data: Tensor) -> Tensor:
    return sent.view(data.dtype).view(data.shape).to(data.device)


def _facts(data: Tensor) -> tuple[list[int], str]:
    return list(data.shape), str(data.dtype).removeprefix("torch.")


def _agree(function: str, facts: Any, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank unless all call the same function with the same facts."""
    if flag_device(group).type != "cpu":
        return
    facts = (function, facts)
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=7).digest()
    number = int.from_bytes(digest, "little")
    bounds = torch.tensor([number, -number])
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group)
    largest, smallest = bounds.tolist()
    if largest == -smallest:
        return
    everyone: list[Any] = [None] * get_world_size(group)
    dist.all_gather_object(everyone, facts, group)
    other = next(rank for rank, theirs in enumerate(everyone) if theirs != everyone[0])
    raise DistributedError(
        f"{function} needs the same call, shapes and dtypes on every rank: rank 0 has "
        f"{_words(everyone[0])}, rank {other} has {_words(everyone[other])}"
    )


def _words(facts: tuple[str, Any]) -> str:
    text = f"{facts[0]}({facts[1]})"
    return text if len(text) <= 300 else f"{text[:300]}..."
