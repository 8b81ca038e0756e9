"""BatchNorm over the batches of all ranks, for every device and without graph breaks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from slipstream.dist import all_reduce, get_dist_info, get_world_size, traceable_sum
from slipstream.errors import ModelError

__all__ = [
    "SyncBatchNorm", "all_reduce_override", "average_batchnorm", "convert_sync_batchnorm",
    "revert_sync_batchnorm",
]  # fmt: skip

_Send = Callable[[Tensor], Tensor]

# Replacement for the all-reduce in eager forward passes, called with the values and the all-reduce function.
# Activation checkpointing sets this variable to reuse the sums of the first forward pass.
all_reduce_override: ContextVar[Callable[[Tensor, _Send], Tensor] | None] = ContextVar(
    "all_reduce_override", default=None
)


class SyncBatchNorm(_BatchNorm):
    """BatchNorm with statistics over the batches of all ranks; its state is compatible with `nn.BatchNorm*d`.

    The means and variances of all ranks are merged as in Chan, Golub and LeVeque 1979: first the weighted mean of the
    means, then the squared deviations from it. This method avoids cancellation and supports a different batch size on
    each rank. The functional collectives are differentiable, can be traced by `torch.compile(fullgraph=True)`, and
    support gloo and nccl.

    In evaluation mode or with one process, this module behaves like BatchNorm.
    """

    original_class: type[_BatchNorm] | None = None
    """Class of the module that `convert_sync_batchnorm` replaced."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.ndim < 2:
            raise ValueError(f"expected an input with at least 2 dimensions, got {input.ndim}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalize each channel of `input` (N, C, ...); float16 and bfloat16 inputs are normalized in float32."""
        if not self.training or get_world_size() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        if input.dtype not in (torch.float16, torch.bfloat16):
            return self._normalize(input)
        x = input.float()
        with nullcontext() if torch.compiler.is_compiling() else _save_in_low_precision(input, full=x):
            return self._normalize(x).to(input.dtype)

    def _normalize(self, x: Tensor) -> Tensor:
        mean, var, count = _global_moments(x)
        self._track(mean.detach(), var.detach(), count)
        scale = torch.rsqrt(var + self.eps)
        if self.affine:
            scale = scale * self.weight
        shift = -mean * scale
        if self.affine:
            shift = shift + self.bias
        shape = (1, -1, *[1] * (x.ndim - 2))
        return x * scale.view(shape) + shift.view(shape)

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        if not self.track_running_stats:
            return
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        # For a cumulative average, the factor is a tensor, because reading the count would synchronize with the device.
        factor: Any = self.momentum
        if factor is None:
            factor = self.num_batches_tracked.to(mean.dtype).reciprocal()
        unbiased = var * (count / (count - 1).clamp_min(1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


@contextmanager
def _save_in_low_precision(low: Tensor, full: Tensor) -> Iterator[None]:
    """Save `low` for the backward pass instead of its float32 copy, which uses twice the memory.

    Other saved-tensor hooks, such as those of activation checkpointing, take precedence.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        yield
        return
    low, version = low.detach(), low._version
    storage, shape = full.untyped_storage()._cdata, full.shape

    def pack(tensor: Tensor) -> Tensor | None:
        return None if tensor.untyped_storage()._cdata == storage and tensor.shape == shape else tensor

    def unpack(saved: Tensor | None) -> Tensor:
        if saved is not None:
            return saved
        if low._version != version:
            raise ModelError(
                "the input of a SyncBatchNorm was changed in place after the forward pass, but the backward pass "
                "requires the original values; use an out-of-place operation"
            )
        return low.float()

    with saved_tensors_hooks(pack, unpack):
        yield


def _global_moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean and variance (C,) of each channel over all ranks, and the number of values per channel (1,)."""
    dims = [0, *range(2, x.ndim)]
    if x.numel():
        var, mean = torch.var_mean(x, dims, correction=0)
    else:  # keep the dependency on x, because the other ranks' backward passes wait for this rank's backward pass
        var = mean = x.sum(dims)
    count = torch.full((1,), x.numel() // x.shape[1], dtype=x.dtype, device=x.device)
    # Merge the moments of all ranks with one collective in the forward pass and one in the backward pass.
    rank, size = get_dist_info()
    own = torch.cat([count, mean, var])
    rows = _sum_over_ranks(F.pad(own[None], (0, 0, rank, size - rank - 1)))  # one row for each rank
    counts, (means, variances) = rows[:, :1].detach(), rows[:, 1:].chunk(2, 1)
    total = counts.sum(0)
    weights = counts / total
    mean = (weights * means).sum(0)
    return mean, (weights * (variances + (means - mean).square())).sum(0), total


def _sum_over_ranks(x: Tensor) -> Tensor:
    if torch.compiler.is_compiling() or (replacement := all_reduce_override.get()) is None:
        return traceable_sum(x)
    return replacement(x, traceable_sum)


def convert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Make every BatchNorm in the module a `SyncBatchNorm`, in place, and return the module.

    Tensors, hooks and attributes are kept. A subclass whose `forward` calls `super().forward` keeps its `forward`.
    Subclasses of torch's SyncBatchNorm already synchronize and are not changed.

    Raises:
        ModelError: a BatchNorm computes its output itself, or its parameters are not initialized.
    """
    layers = [
        (layer, _synchronized(type(layer), layer, name))
        for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm)
        if type(layer) is nn.SyncBatchNorm or not isinstance(layer, nn.SyncBatchNorm)
    ]
    for layer, kind in layers:
        layer.original_class = type(layer)  # type: ignore[assignment]
        layer.__class__ = kind
    return module


def _synchronized(kind: type[_BatchNorm], layer: _BatchNorm, name: str) -> type[SyncBatchNorm]:
    """Return `SyncBatchNorm`, or a subclass of `kind` in which `super().forward` is that of `SyncBatchNorm`."""
    replaced = "forward" in vars(layer)
    if kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm) and not replaced:
        return SyncBatchNorm
    problem = ""
    if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
        problem = "its parameters are not initialized; run one batch first"
    elif replaced or not _calls_super(layer, kind):
        problem = "its forward does not call super().forward in training; do so, or remove sync_bn"
    if problem:
        raise ModelError(f"sync_bn does not support the layer '{name}' ({kind.__name__}), because {problem}")
    return type(kind.__name__, (kind, SyncBatchNorm), {})


class _ReachedError(Exception):
    """The forward of the base class was called."""


class _Probe(SyncBatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        raise _ReachedError


def _calls_super(layer: _BatchNorm, kind: type[_BatchNorm]) -> bool:
    """Return whether the forward of `kind` calls that of its base class in training; the call ends there."""
    probe: Any = copy.copy(layer)
    probe.__class__, probe.training = type(kind.__name__, (kind, _Probe), {}), True
    # The forward of `kind` may change buffers in place.
    probe._buffers = {
        key: buffer if buffer is None else buffer.clone() for key, buffer in layer._buffers.items()
    }
    tensor = next(chain(layer.parameters(), layer.buffers()), torch.empty(0))
    sizes = {nn.BatchNorm1d: 0, nn.BatchNorm3d: 3}
    pixels = next((n for base, n in sizes.items() if isinstance(layer, base)), 2)
    try:
        probe.forward(
            torch.zeros(2, layer.num_features, *[1] * pixels, dtype=tensor.dtype, device=tensor.device)
        )
    except Exception as error:
        return isinstance(error, _ReachedError)
    return False


@torch.no_grad()
def average_batchnorm(model: nn.Module) -> None:
    """Average the running BatchNorm statistics over all ranks in one all-reduce; SyncBN statistics already match.

    The statistics differ because each rank processes different batches. Without averaging, the checkpoint would contain
    the statistics of rank 0, while each rank would validate with its local statistics.
    """
    plain = [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm | nn.SyncBatchNorm)
    ]
    moments = [m for module in plain for m in (module.running_mean, module.running_var) if m is not None]
    if get_world_size() == 1 or not moments:
        return
    flat = torch.cat(moments)
    all_reduce(flat, "mean")
    for own, mean in zip(moments, flat.split([len(m) for m in moments]), strict=True):
        own.copy_(mean)


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Give every `SyncBatchNorm` in the module its original class, in place, and return the module.

    torch's `nn.SyncBatchNorm` does not store the original class, so it becomes a BatchNorm that accepts inputs with any
    number of dimensions.
    """
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            default = nn.BatchNorm2d if type(layer) is SyncBatchNorm else type(layer)
            kind: Any = vars(layer).pop("original_class", default)
            layer.__class__ = _AnyBatchNorm if kind is nn.SyncBatchNorm else kind
    return module


class _AnyBatchNorm(_BatchNorm):
    """BatchNorm that accepts inputs with any number of dimensions."""

    def _check_input_dim(self, input: Tensor) -> None:
        return
