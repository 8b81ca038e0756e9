"""Decisions about numbers that are taken on the device, so that the host never waits for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from slipstream.optim.optim_wrapper import OptimWrapper

__all__ = ["LossScale", "Scalar", "all_finite", "keep_unless", "only_if", "precise_dtype", "scale_"]


def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return a 0-dim bool tensor on the tensors' device: whether every value of all of them is finite."""
    largest = [x.detach().abs().amax().float() for x in tensors if x.numel()]  # NaN is larger than anything
    return torch.isfinite(torch.stack(largest)).all()


def keep_unless(finite: Tensor, tensors: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    """Put `before` back into `tensors`, in place, unless `finite` (0-dim bool) is true.

    In a compiled graph this costs no memory traffic of its own: the choice is made where the values are written.
    """
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(torch.where(finite, tensor, old))


def only_if(
    finite: Tensor, update: Callable[[list[Tensor]], object], moved: Sequence[Tensor]
) -> Callable[[list[Tensor]], None]:
    """Return `update` such that the tensors it moves keep their values unless `finite` (0-dim bool) is true."""

    def guarded(grads: list[Tensor]) -> None:
        before = [tensor.clone() for tensor in moved]
        update(grads)
        keep_unless(finite, moved, before)

    return guarded


def scale_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply all tensors by `factor` (0-dim), in place."""
    # Compiled, each product joins the kernel that reads it; eagerly, one call serves all tensors of one device.
    if torch.compiler.is_compiling() or any(tensor.device != factor.device for tensor in tensors):
        for tensor in tensors:
            tensor.mul_(factor.to(tensor.device, tensor.dtype))
    elif tensors:
        torch._foreach_mul_(tensors, factor)


def precise_dtype(device: torch.device) -> torch.dtype:
    """Return float64 where the device has it: numbers that the host computes, as Python does, in that precision."""
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32


class Scalar:
    """A number that the host changes and a graph reads, written only when it changes.

    It is a tensor of one element: of a 0-dim float64 tensor on a CPU, torch takes the value for a Python number.
    """

    def __init__(self, value: float, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.value = value
        self.tensor = torch.full((1,), value, dtype=dtype, device=device)

    def set(self, value: float) -> None:
        """Let the graph read `value` from now on."""
        if value != self.value:
            self.value = value
            self.tensor.fill_(value)

    def read(self) -> Tensor:
        """Return the number as a 0-dim tensor; traceable."""
        return self.tensor.select(0, 0)


class LossScale:
    """The state of a `torch.amp.GradScaler` as a graph uses it: scale and growth count are the scaler's own tensors.

    Args:
        scaler: whose tensors these are.
        adapts: whether the scale follows overflows, or is fixed.
        device: of the loss.
    """

    def __init__(self, scaler: torch.amp.GradScaler, adapts: bool, device: torch.device) -> None:
        scaler.scale(torch.zeros((), device=device))  # makes its tensors
        self.scale: Tensor = scaler._scale  # type: ignore[assignment]
        self.growth_tracker: Tensor = scaler._growth_tracker  # type: ignore[assignment]
        self.adapts = adapts
        self.growth, self.backoff = scaler.get_growth_factor(), scaler.get_backoff_factor()
        self.interval = scaler.get_growth_interval()

    @classmethod
    def of(cls, optim: OptimWrapper, device: torch.device) -> LossScale | None:
        """Return the scale of an optimizer wrapper that has one."""
        scaler = optim.loss_scaler
        return None if scaler is None else cls(scaler, optim.adapts_scale, device)

    @property
    def state(self) -> tuple[Tensor, Tensor]:
        """What a step changes."""
        return self.scale, self.growth_tracker

    def unscale(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of the loss itself."""
        inverse = self.scale.double().reciprocal().float()  # as GradScaler computes it
        return [grad * inverse.to(grad.dtype) for grad in grads]

    def adapt(self, finite: Tensor) -> None:
        """Follow `GradScaler.update`: fall after an overflow, rise after `interval` steps without one."""
        if not self.adapts:
            return
        count = self.growth_tracker + 1
        exact = self.scale.double()  # as torch multiplies it
        grown = (exact * self.growth).float()
        full = finite & (count == self.interval)
        risen = torch.where(full & torch.isfinite(grown), grown, self.scale)
        self.scale.copy_(torch.where(finite, risen, (exact * self.backoff).float()))
        self.growth_tracker.copy_(torch.where(finite & ~full, count, torch.zeros_like(count)))
