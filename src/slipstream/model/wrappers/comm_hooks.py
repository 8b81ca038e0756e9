"""Communication hooks for DDP that compress gradients to half precision or to low-rank factors (PowerSGD).

PyTorch's own hooks are not used: the bfloat16 hook requires a CUDA build, and the PowerSGD hook waits inside callbacks
on gloo's threads, which deadlocks with several buckets. The PowerSGD hook also stores its state by bucket, so the state
cannot be saved in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.config import options
from slipstream.dist import gather_named_tensors, own_or_mean
from slipstream.errors import ConfigError
from slipstream.typecheck import NonNegativeInt, PositiveInt

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

__all__ = ["HalfPrecision", "PowerSGD", "PowerSGDOptions", "make_comm_hook", "run_comm_hook"]

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_KINDS = (*_HALVES, "powersgd")


@dataclass(frozen=True)
class PowerSGDOptions:
    """Options for `comm_hook=dict(type='powersgd', ...)`."""

    rank: PositiveInt = 2
    """Number of columns in each factor; a matrix (n, m) is sent as (n + m) * rank values."""
    start_step: NonNegativeInt = 1000
    """Number of initial steps with exact gradients; compressing gradients early in training is harmful. About
    10% of all steps is a good value."""


class HalfPrecision:
    """Send gradients as bfloat16 or float16, after dividing them by the number of ranks to avoid overflow."""

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        self.group = group
        self.dtype = dtype

    def __call__(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Return a future for the bucket's mean over all ranks, in the bucket's dtype."""
        buffer = bucket.buffer()
        return _mean(buffer, buffer.div_(self.group.size()).to(self.dtype), self.group)


class PowerSGD:
    """Send two factors of rank r instead of each large gradient (Vogels et al. 2019, arXiv:1905.13727).

    A gradient (n, ...) is treated as a matrix (n, m). It is sent uncompressed unless the two factors together are
    smaller than half its size. The approximation error is added to the next gradient (error feedback), and the second
    factor of each step is the starting point of the next power iteration. The two small all-reduces per bucket do not
    overlap with the backward pass.

    Args:
        group: process group.
        parameters: names and parameters of the model.
        options: compression options.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        parameters: Iterable[tuple[str, nn.Parameter]],
        options: PowerSGDOptions,
    ) -> None:
        self.group = group
        self.options = options
        self.step = 0
        self.errors: dict[str, Tensor] = {}
        self.factors: dict[str, Tensor] = {}
        self._names = {id(parameter): name for name, parameter in parameters}

    def __call__(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Return a future for the (approximate) mean of the bucket over all ranks."""
        if self.step < self.options.start_step:
            buffer = bucket.buffer()
            future = _mean(buffer, buffer.div_(self.group.size()), self.group)
        else:
            self._approximate(bucket)
            future = torch.futures.Future(devices=_devices(bucket.buffer()))
            future.set_result(bucket.buffer())
        self.step += bucket.is_last()
        return future

    def _approximate(self, bucket: GradBucket) -> None:
        named = [self._names[id(parameter)] for parameter in bucket.parameters()]
        gradients = list(zip(named, bucket.gradients(), strict=True))
        compressed = [(name, gradient) for name, gradient in gradients if self._compresses(gradient)]
        exact = [gradient for _, gradient in gradients if not self._compresses(gradient)]
        matrices = [self._corrected(name, gradient) for name, gradient in compressed]
        # Only the column space of a basis matters, so the sums of the bases are not divided by the number of ranks.
        before = [self._factor(name, m) for (name, _), m in zip(compressed, matrices, strict=True)]
        bases = [m @ factor for m, factor in zip(matrices, before, strict=True)]
        sums = self._sum([*exact, *bases])
        for gradient, total in zip(exact, sums[: len(exact)], strict=True):
            gradient.copy_(total.div_(self.group.size()))
        bases = [torch.linalg.qr(basis).Q for basis in sums[len(exact) :]]
        factors = self._sum([m.T @ basis for m, basis in zip(matrices, bases, strict=True)])
        for (name, gradient), m, basis, factor, old in zip(
            compressed, matrices, bases, factors, before, strict=True
        ):
            approximation = basis @ factor.div_(self.group.size()).T
            gradient.copy_(approximation.view(gradient.shape))
            # After an overflow, the loss scaler skips the step, and all ranks keep their previous errors and factors.
            finite = factor.isfinite().all()
            error = self.errors.get(name)
            zero = torch.zeros_like(m) if error is None else error.to(m)
            self.errors[name] = torch.where(finite, m.sub_(approximation), zero)
            self.factors[name] = torch.where(finite, factor, old)

    def _compresses(self, gradient: Tensor) -> bool:
        n, m = _matrix(gradient)
        return 2 * (n + m) * min(n, m, self.options.rank) < n * m

    def _corrected(self, name: str, gradient: Tensor) -> Tensor:
        matrix = gradient.to(_compute_dtype(gradient), copy=True).reshape(_matrix(gradient))
        error = self.errors.get(name)
        return matrix if error is None else matrix.add_(error.to(matrix.device))

    def _factor(self, name: str, matrix: Tensor) -> Tensor:
        n, m = matrix.shape
        if name not in self.factors:  # initialized to the same values on every rank
            generator = torch.Generator().manual_seed(list(self._names.values()).index(name))
            self.factors[name] = torch.randn(m, min(n, m, self.options.rank), generator=generator)
        return self.factors[name].to(matrix)

    def _sum(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the sums over all ranks, computed with one all-reduce."""
        if not tensors:
            return []
        flat = torch.cat([t.to(_compute_dtype(t)).flatten() for t in tensors])
        dist.all_reduce(flat, group=self.group)
        parts = flat.split([t.numel() for t in tensors])
        return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Return the step, each rank's errors (on rank 0) and the factors; every rank must call this method."""
        errors = gather_named_tensors(self.errors, self.group)
        return {"step": self.step, "errors": errors, "factors": dict(self.factors)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`. Factors with a different number of columns are reinitialized.

        If the number of processes has changed, each process receives the mean of the errors, which preserves the mean
        error over all processes.
        """
        self.step = state_dict["step"]
        self.errors = own_or_mean(state_dict["errors"], self.group.rank(), self.group.size())
        self.factors = {
            name: factor
            for name, factor in state_dict["factors"].items()
            if factor.shape[1] == self.options.rank
        }


def make_comm_hook(
    comm_hook: str | Mapping[str, Any], group: dist.ProcessGroup, module: nn.Module
) -> HalfPrecision | PowerSGD:
    """Return the hook for `comm_hook`: `'bf16'`, `'fp16'`, `'powersgd'`, or a dict with one of these as its `type`.

    Raises:
        ConfigError: if the type or an option is unknown.
    """
    user_config: Mapping[str, Any] = comm_hook if isinstance(comm_hook, Mapping) else {"type": comm_hook}
    kind = user_config.get("type")
    if kind not in _KINDS:
        raise ConfigError(
            f"must be one of {_KINDS} or a dict with one of these as its 'type', not {comm_hook!r}",
            "comm_hook",
        )
    rest = {key: value for key, value in user_config.items() if key != "type"}
    if kind == "powersgd":
        return PowerSGD(group, module.named_parameters(), options(PowerSGDOptions, rest, "comm_hook"))
    if rest:
        raise ConfigError(f"'{kind}' accepts no options, but got {sorted(rest)}; remove them", "comm_hook")
    return HalfPrecision(group, _HALVES[kind])


def run_comm_hook(state: HalfPrecision | PowerSGD, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Run a hook; pass this function to `DistributedDataParallel.register_comm_hook(state, run_comm_hook)`."""
    return state(bucket)


run_comm_hook.__annotations__.clear()  # DDP compares annotations with classes, but these annotations are strings


def _mean(buffer: Tensor, scaled: Tensor, group: dist.ProcessGroup) -> torch.futures.Future[Tensor]:
    """Return a future for `buffer`, filled with the sum of `scaled` over all ranks."""
    work = dist.all_reduce(scaled, group=group, async_op=True)
    assert work is not None
    done: torch.futures.Future[Tensor] = work.get_future().then(lambda f: buffer.copy_(f.value()[0]))
    return done


def _matrix(tensor: Tensor) -> tuple[int, int]:
    n = tensor.shape[0] if tensor.ndim else 1
    return n, tensor.numel() // max(n, 1)


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype used for computation; QR does not support half precision."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _devices(tensor: Tensor) -> list[int | str | torch.device]:
    return [] if tensor.device.type == "cpu" else [tensor.device]
