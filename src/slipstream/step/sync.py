"""Average gradients across processes, in buckets, as part of a step's graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.dist import all_reduce, traceable_sum

__all__ = ["GradientSync", "any_rank"]

# Minimum size of a bucket, except for the last bucket of each dtype. As in DDP, it is large enough for full bandwidth,
# and small enough to overlap communication with the backward pass.
_BUCKET_BYTES = 25 * 2**20


class GradientSync:
    """Averages gradients across all ranks with functional collectives, which `torch.compile` can trace.

    Buckets contain the gradients in the order in which the backward pass computes them (last layer first). The
    reductions of all buckets start before the step waits for the first one.

    Args:
        world_size: number of ranks.
        dtype: communication dtype, e.g. `torch.bfloat16`; None uses the dtype of the gradients.
    """

    def __init__(self, world_size: int, dtype: torch.dtype | None = None) -> None:
        self.world_size, self.dtype = world_size, dtype

    def __call__(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean of each gradient across all ranks, in the order of `grads`."""
        buckets = _buckets(grads)
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


def any_rank(flags: Sequence[bool], device: torch.device) -> list[bool]:
    """Return, for each flag, whether it is set on any rank; the call waits for all ranks."""
    counts = torch.tensor(flags, dtype=torch.float32, device=device)
    all_reduce(counts, "sum")
    return [count > 0 for count in counts.tolist()]


def _buckets(grads: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of the gradients in each bucket, in reverse order; each bucket has a single dtype."""
    full: list[list[int]] = []
    open_: dict[torch.dtype, list[int]] = {}
    sizes: dict[torch.dtype, int] = {}
    for index in reversed(range(len(grads))):
        grad = grads[index]
        open_.setdefault(grad.dtype, []).append(index)
        sizes[grad.dtype] = sizes.get(grad.dtype, 0) + grad.numel() * grad.element_size()
        if sizes[grad.dtype] >= _BUCKET_BYTES:
            full.append(open_.pop(grad.dtype))
            sizes[grad.dtype] = 0
    return [*full, *open_.values()]
