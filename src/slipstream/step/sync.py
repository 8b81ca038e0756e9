"""Sum gradients over the processes inside a graph, a bucket at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor

from slipstream.dist import all_reduce

__all__ = ["GradientSync"]

_BUCKET_BYTES = 25 * 2**20  # as in DDP: large enough for bandwidth, small enough to leave while backward runs


class GradientSync:
    """The mean of gradients over all ranks, by functional collectives, which `torch.compile` can trace.

    Buckets hold the gradients in the order in which backward finishes them (the last layer's first), and every one
    is sent before the first is waited for.

    Args:
        world_size: number of ranks.
        dtype: what is sent, e.g. `torch.bfloat16`; None sends gradients as they are.
        bucket_bytes: least size at which a bucket is closed.
    """

    def __init__(
        self, world_size: int, dtype: torch.dtype | None = None, bucket_bytes: int = _BUCKET_BYTES
    ) -> None:
        self.world_size = world_size
        self.dtype = dtype
        self.bucket_bytes = bucket_bytes

    def __call__(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean of each gradient over all ranks, in the order given."""
        group = cast("dist.ProcessGroup", dist.group.WORLD)
        buckets = self.buckets(grads)
        sums = []
        for bucket in buckets:
            flat = (
                torch.cat([grads[i].reshape(-1) for i in bucket]) / self.world_size
            )  # first: float16 overflows
            sums.append(collectives.all_reduce(flat.to(self.dtype or flat.dtype), "sum", group))
        means: dict[int, Tensor] = {}
        for bucket, total in zip(buckets, sums, strict=True):
            parts = total.split([grads[i].numel() for i in bucket])
            for i, part in zip(bucket, parts, strict=True):
                means[i] = part.view(grads[i].shape).to(grads[i].dtype)
        return [means[i] for i in range(len(grads))]

    def any_rank(self, flags: Sequence[bool], device: torch.device) -> list[bool]:
        """Return for each of the flags whether it is set on any rank; waits for them all."""
        counts = torch.tensor(flags, dtype=torch.float32, device=device)
        all_reduce(counts, "sum")
        return [count > 0 for count in counts.tolist()]

    def buckets(self, grads: Sequence[Tensor]) -> list[list[int]]:
        """Return the indices of the gradients in each bucket, last ones first; one dtype a bucket."""
        closed: list[list[int]] = []
        filling: dict[torch.dtype, tuple[list[int], int]] = {}
        for index in reversed(range(len(grads))):
            grad = grads[index]
            members, size = filling.get(grad.dtype, ([], 0))
            members, size = [*members, index], size + grad.numel() * grad.element_size()
            if size >= self.bucket_bytes:
                closed.append(members)
                filling.pop(grad.dtype, None)
            else:
                filling[grad.dtype] = (members, size)
        return [*closed, *(members for members, _ in filling.values())]
