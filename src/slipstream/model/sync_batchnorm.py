"""BatchNorm over the batches of all ranks, on every device, without a graph break."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from slipstream.dist import all_reduce, get_dist_info, get_world_size

__all__ = ["SyncBatchNorm", "average_batchnorm", "convert_sync_batchnorm", "revert_sync_batchnorm", "summing"]

_ONE_MESSAGE = 2**18  # values; up to here a row for each rank takes less time than a second message would

_Send = Callable[[Tensor], Tensor]

summing: ContextVar[Callable[[Tensor, _Send], Tensor] | None] = ContextVar("summing", default=None)
"""What eager forwards call with their values, and the all-reduce, in its place: whoever computes a forward again has
the sums already."""


class SyncBatchNorm(_BatchNorm):
    """BatchNorm whose batch is that of all ranks together; its state is that of `nn.BatchNorm*d`.

    Means and variances of the ranks are merged as in Chan, Golub and LeVeque 1979: first the mean from the
    weighted means, then the squared deviations from that mean, so that nothing cancels and ranks may hold
    batches of different sizes. The collectives are functional, hence differentiable, traceable by
    `torch.compile(fullgraph=True)`, and available on gloo as well as nccl.

    In evaluation, or with one process, it is plain BatchNorm.
    """

    was: type[_BatchNorm] | None = None
    """The class that `convert_sync_batchnorm` found in this place."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, got {input.ndim}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input` (N, C, ...) channel by channel; float16 and bfloat16 are summed in float32."""
        if not self.training or get_world_size() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        mean, var, count = _global_moments(x)
        self._track(mean.detach(), var.detach(), count)
        scale = torch.rsqrt(var + self.eps)
        if self.affine:
            scale = scale * self.weight
        shift = -mean * scale
        if self.affine:
            shift = shift + self.bias
        shape = (1, -1, *[1] * (x.ndim - 2))
        return (x * scale.view(shape) + shift.view(shape)).to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        if not self.track_running_stats:
            return
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        # A mean of all batches has its share as a tensor: reading the count would wait for the device.
        share: Any = self.momentum
        if share is None:
            share = self.num_batches_tracked.to(mean.dtype).reciprocal()
        unbiased = var * (count / (count - 1).clamp_min(1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


def _global_moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each channel's mean and variance (C,) over all ranks, and the number of values (1,)."""
    dims = [0, *range(2, x.ndim)]
    if x.numel():
        var, mean = torch.var_mean(x, dims, correction=0)
    else:  # zeros that still depend on x: the other ranks' backward waits for this one's
        var = mean = x.sum(dims)
    count = torch.full((1,), x.numel() // x.shape[1], dtype=x.dtype, device=x.device)
    if get_world_size() * (2 * len(mean) + 1) <= _ONE_MESSAGE:
        return _merge_gathered(mean, var, count)
    return _merge_summed(mean, var, count)


def _merge_gathered(mean: Tensor, var: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the moments of all ranks with one message in forward and one in backward."""
    rank, size = get_dist_info()
    own = torch.cat([count, mean, var])
    rows = _sum_over_ranks(F.pad(own[None], (0, 0, rank, size - rank - 1)))  # each rank has a row of its own
    counts, (means, variances) = rows[:, :1].detach(), rows[:, 1:].chunk(2, 1)
    total = counts.sum(0)
    shares = counts / total
    mean = (shares * means).sum(0)
    return mean, (shares * (variances + (means - mean).square())).sum(0), total


def _merge_summed(mean: Tensor, var: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Merge them with two messages each way, whose size does not grow with the number of ranks."""
    sums = _sum_over_ranks(torch.cat([mean * count, count]))
    total = sums[-1:].detach()
    whole_mean = sums[:-1] / total
    squares = (var + (mean - whole_mean).square()) * count
    return whole_mean, _sum_over_ranks(squares) / total, total


def _sum_over_ranks(x: Tensor) -> Tensor:
    if torch.compiler.is_compiling() or (stand_in := summing.get()) is None:
        return _all_reduce(x)
    return stand_in(x, _all_reduce)


def _all_reduce(x: Tensor) -> Tensor:
    total: Tensor = collectives.all_reduce(x, "sum", cast("dist.ProcessGroup", dist.group.WORLD))
    return total


def convert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Return the module with every BatchNorm replaced by a `SyncBatchNorm` that shares its tensors."""
    if isinstance(module, _BatchNorm):
        return module if isinstance(module, SyncBatchNorm) else _as(SyncBatchNorm, module, was=type(module))
    for name, child in module.named_children():
        setattr(module, name, convert_sync_batchnorm(child))
    return module


@torch.no_grad()
def average_batchnorm(model: nn.Module) -> None:
    """Give every rank the mean of all ranks' running BatchNorm statistics, in one message; those of SyncBN agree.

    Each rank has seen its own part of the batches. Evaluated or saved as they are, the statistics of rank 0 would stand
    in the checkpoint, and those of all ranks in the metrics.
    """
    plain = [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm | nn.SyncBatchNorm)
    ]
    moments = [m for module in plain for m in (module.running_mean, module.running_var) if m is not None]
    if get_world_size() == 1 or not moments:
        return
    together = torch.cat(moments)
    all_reduce(together, "mean")
    for own, mean in zip(moments, together.split([len(m) for m in moments]), strict=True):
        own.copy_(mean)


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Return the module with every `SyncBatchNorm` replaced by what it was, sharing its tensors."""
    if isinstance(module, SyncBatchNorm):
        return _as(module.was or nn.BatchNorm2d, module)
    for name, child in module.named_children():
        setattr(module, name, revert_sync_batchnorm(child))
    return module


def _as(kind: type[_BatchNorm], module: _BatchNorm, was: type[_BatchNorm] | None = None) -> _BatchNorm:
    """Return a module of class `kind` with the very tensors of `module`."""
    options = {"affine": module.affine, "track_running_stats": module.track_running_stats}
    new = kind(module.num_features, module.eps, module.momentum, **options)
    new._parameters, new._buffers, new.training = module._parameters, module._buffers, module.training
    if was is not None:
        new.was = was  # type: ignore[assignment]
    return new
