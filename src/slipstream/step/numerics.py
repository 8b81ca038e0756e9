"""Finiteness checks, scalars and the loss scale, computed on the device without synchronization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.dist import all_reduce
from slipstream.sharding import is_sharded, local_shard

__all__ = [
    "HostNumber", "LossScale", "all_finite", "check_finite", "precise_dtype", "scale_",
]  # fmt: skip


def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return whether all elements of the tensors are finite, as a 0-dim bool tensor on their device."""
    device = tensors[0].device
    tensors = [tensor.detach() for tensor in tensors if tensor.numel()]
    if not tensors:  # a rank's shards can be empty
        return torch.ones((), dtype=torch.bool, device=device)
    if torch.compiler.is_compiling():  # inductor fuses these operations into a few kernels
        # `amax` propagates NaN, and so does the norm below.
        return torch.isfinite(torch.stack([x.abs().amax().float() for x in tensors])).all()
    largest = torch._foreach_norm(tensors, torch.inf)
    return torch.isfinite(torch.stack([norm.float() for norm in largest])).all()


def _values_of(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that contain the gradients' values on this rank, without copies."""
    return [
        grad._values() if grad.is_sparse else grad if type(grad) is Tensor else local_shard(grad)
        for grad in grads
    ]


def scale_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply all tensors by `factor` (0-dim), in place."""
    # Inductor fuses each product into the kernel that reads it; in eager mode, one foreach call is faster.
    if torch.compiler.is_compiling() or any(tensor.device != factor.device for tensor in tensors):
        for tensor in tensors:
            tensor.mul_(factor.to(tensor.device, tensor.dtype))
    elif tensors:
        torch._foreach_mul_(tensors, factor)


def precise_dtype(device: torch.device) -> torch.dtype:
    """Return float64 (the precision of Python floats) if the device supports it, otherwise float32."""
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32


class HostNumber:
    """A number that is set on the host and read by a graph. It is stored in a tensor, which is written only when the
    number changes.

    The tensor has shape (1,), because Dynamo treats a 0-dim float64 CPU tensor as a Python number.
    """

    def __init__(self, value: float, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.value = value
        self.tensor = torch.full((1,), value, dtype=dtype, device=device)

    def set(self, value: float) -> None:
        """Set the number."""
        if value != self.value:
            self.value = value
            self.tensor.fill_(value)

    def read(self) -> Tensor:
        """Return the number as a 0-dim tensor. `torch.compile` can trace this method."""
        return self.tensor.select(0, 0)


class LossScale:
    """A traceable version of `torch.amp.GradScaler` that uses the scale and growth tracker tensors of `scaler`.

    Args:
        scaler: the scaler whose tensors are used.
        adapts: whether the scale is dynamic.
        device: device of the loss.
    """

    def __init__(self, scaler: torch.amp.GradScaler, adapts: bool, device: torch.device) -> None:
        scaler.scale(torch.zeros((), device=device))  # creates the scaler's tensors
        self.scale: Tensor = scaler._scale  # type: ignore[assignment]
        self.growth_tracker: Tensor = scaler._growth_tracker  # type: ignore[assignment]
        self.adapts, self._scaler, self._precise = adapts, scaler, precise_dtype(self.scale.device)

    @property
    def state(self) -> tuple[Tensor, Tensor]:
        """The scale and the growth tracker, which a step changes in place."""
        return self.scale, self.growth_tracker

    def unscale(self, grads: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Divide the gradients by the scale, in place if eager; return them and whether all are finite."""
        exact = self.scale.to(self._precise)
        inverse = exact.reciprocal().float()  # the same rounding as in GradScaler
        if torch.compiler.is_compiling():
            grads = [grad * inverse.to(grad.dtype) for grad in grads]
            return grads, all_finite(grads)
        states = self._scaler._per_optimizer_states
        if states:  # the user has called `loss_scaler.unscale_`, for example to clip
            states.clear()
            inverse = torch.ones_like(inverse)
        kinds: dict[Any, list[Tensor]] = {}
        for grad in _values_of(grads):
            kinds.setdefault((grad.device, grad.dtype), []).append(grad)
        overflow = torch.zeros((), device=self.scale.device)
        for (device, _), group in kinds.items():
            found = torch.zeros((), device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(group, found, inverse.to(device))
            overflow = overflow + found.to(overflow.device)
        return grads, overflow == 0

    def adapt(self, finite: Tensor) -> None:
        """Decrease the scale after an overflow, or increase it after `interval` finite steps, like `GradScaler`."""
        if not self.adapts:
            return
        if torch.compiler.is_compiling():
            self.adapt_traced(finite)
        else:
            s = self._scaler
            settings = s._growth_factor, s._backoff_factor, s._growth_interval
            torch._amp_update_scale_(self.scale, self.growth_tracker, (~finite).float(), *settings)

    def adapt_traced(self, finite: Tensor) -> None:
        """Change the scale as `adapt` does, with operations that `torch.compile` can trace."""
        scaler, count = self._scaler, self.growth_tracker + 1
        exact = self.scale.to(self._precise)
        grown = (exact * scaler._growth_factor).float()
        full = finite & (count == scaler._growth_interval)
        risen = torch.where(full & torch.isfinite(grown), grown, self.scale)
        self.scale.copy_(torch.where(finite, risen, (exact * scaler._backoff_factor).float()))
        self.growth_tracker.copy_(torch.where(finite & ~full, count, torch.zeros_like(count)))


def check_finite(
    grads: list[Tensor], flags: Sequence[Tensor], scale: LossScale | None, local: bool
) -> tuple[list[Tensor], Tensor]:
    """Unscale the gradients of an accumulation window, and adapt the loss scale.

    Args:
        grads: the gradients, which are changed in place if eager.
        flags: one-element tensors, which are not 0 if a loss was not finite.
        scale: the loss scale, or None.
        local: whether the flags are those of this rank only.

    Returns:
        The gradients, and whether losses and gradients are finite (0-dim bool on the device).
    """
    if scale is not None:
        grads, finite = scale.unscale(grads)
    else:
        finite = all_finite(_values_of(grads) or flags)
    for flag in flags:
        finite = finite & (flag.select(0, 0) == 0).to(finite.device)
    distributed = local and torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and (flags or any(map(is_sharded, grads))):
        # A logical and over all ranks, without waiting for the device.
        everywhere = finite.to(torch.int32)
        all_reduce(everywhere, "min")
        finite = everywhere.bool()
    if scale is not None:
        scale.adapt(finite)
    return grads, finite
