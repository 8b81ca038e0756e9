"""Average gradients across processes, in buckets, as part of a step's graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.dist import all_reduce, traceable_sum

__all__ = ["GradientSync"]

_BUCKET_BYTES = 25 * 2**20
"""As in DDP: large enough for full bandwidth, and small enough to overlap communication with the backward pass."""


class GradientSync:
    """Averages gradients across all ranks with functional collectives, which `torch.compile` can trace.

    Buckets contain the gradients in the order in which the backward pass computes them (last layer first). The
    reductions of all buckets start before the step waits for the first one.

    Args:
        world_size: number of ranks.
        dtype: communication dtype, e.g. `torch.bfloat16`; None uses the dtype of the gradients.
        bucket_bytes: minimum size of each bucket in bytes, except for the last bucket of each dtype.
    """

    def __init__(
        self, world_size: int, dtype: torch.dtype | None = None, bucket_bytes: int = _BUCKET_BYTES
    ) -> None:
        self.world_size = world_size
        self.dtype = dtype
        self.bucket_bytes = bucket_bytes

    def __call__(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean of each gradient across all ranks, in the order of `grads`."""
        buckets = self.buckets(grads)
        sums = []
        for bucket in buckets:
            # Divide before the sum, which could overflow in float16.
            flat = torch.cat([grads[i].reshape(-1) for i in bucket]) / self.world_size
            sums.append(traceable_sum(flat.to(self.dtype or flat.dtype)))
        means: dict[int, Tensor] = {}
        for bucket, total in zip(buckets, sums, strict=True):
            parts = total.split([grads[i].numel() for i in bucket])
            for i, part in zip(bucket, parts, strict=True):
                means[i] = part.view(grads[i].shape).to(grads[i].dtype)
        return [means[i] for i in range(len(grads))]

    def any_rank(self, flags: Sequence[bool], device: torch.device) -> list[bool]:
        """Return, for each flag, whether it is set on any rank; the call waits for all ranks."""
        counts = torch.tensor(flags, dtype=torch.float32, device=device)
        all_reduce(counts, "sum")
        return [count > 0 for count in counts.tolist()]

    def buckets(self, grads: Sequence[Tensor]) -> list[list[int]]:
        """Return the indices of the gradients in each bucket, in reverse order; each bucket has a single dtype."""
        full: list[list[int]] = []
        open_: dict[torch.dtype, tuple[list[int], int]] = {}
        for index in reversed(range(len(grads))):
            grad = grads[index]
            members, size = open_.get(grad.dtype, ([], 0))
            members, size = [*members, index], size + grad.numel() * grad.element_size()
            if size >= self.bucket_bytes:
                full.append(members)
                open_.pop(grad.dtype, None)
            else:
                open_[grad.dtype] = (members, size)
        return [*full, *(members for members, _ in open_.values())]
