"""What DDP sends instead of whole gradients: half the bytes, or low-rank factors (PowerSGD).

torch's own hooks are not used: its bfloat16 one refuses a build without CUDA, and its PowerSGD waits inside
the callbacks of gloo's threads (several buckets block each other for good) and keeps its memory by bucket,
so that no checkpoint could hold it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.config import options
from slipstream.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

__all__ = ["HalfPrecision", "PowerSGD", "PowerSGDOptions", "make_comm_hook", "run_comm_hook"]

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_KINDS = (*_HALVES, "powersgd")


@dataclass(frozen=True)
class PowerSGDOptions:
    """Options of `comm_hook=dict(type='powersgd', ...)`."""

    rank: int = 2
    """Columns of the factors; each matrix (n, m) costs (n + m) * rank numbers on the wire."""
    start_step: int = 1000
    """Steps of exact gradients before: early ones do not bear it (about a tenth of the training)."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"must be at least 1, not {self.rank}", "rank")
        if self.start_step < 0:
            raise ConfigError(f"must not be negative, but is {self.start_step}", "start_step")


class HalfPrecision:
    """Sends gradients as bfloat16 or float16; they are divided by the number of ranks first, against overflow."""

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        self.group = group
        self.dtype = dtype

    def __call__(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Return the future of the bucket's mean over all ranks, in the bucket's own dtype."""
        buffer = bucket.buffer()
        return _mean(buffer, buffer.div_(self.group.size()).to(self.dtype), self.group)


class PowerSGD:
    """Sends two factors of rank r of each gradient that is worth it (Vogels et al. 2019, arXiv:1905.13727).

    A gradient (n, ...) counts as a matrix (n, m); one that would not shrink to half is sent as it is. What
    the factors miss is added to the next gradient (error feedback), and each step's factor starts the next
    one's power iteration. The two small all-reduces of each bucket are not overlapped with backward.

    Args:
        group: the ranks.
        parameters: all of the model, by name.
        how: the options.
    """

    def __init__(
        self, group: dist.ProcessGroup, parameters: Iterable[tuple[str, nn.Parameter]], how: PowerSGDOptions
    ) -> None:
        self.group = group
        self.how = how
        self.step = 0
        self.errors: dict[str, Tensor] = {}
        self.factors: dict[str, Tensor] = {}
        self._names = {id(parameter): name for name, parameter in parameters}

    def __call__(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Return the future of the bucket's (approximate) mean over all ranks."""
        if self.step < self.how.start_step:
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
        low = [(name, gradient) for name, gradient in gradients if self._shrinks(gradient)]
        exact = [gradient for _, gradient in gradients if not self._shrinks(gradient)]
        matrices = [self._corrected(name, gradient) for name, gradient in low]
        # Of P only the space matters that its columns span, so that its scale is left as it is.
        before = [self._factor(name, m) for (name, _), m in zip(low, matrices, strict=True)]
        bases = [m @ factor for m, factor in zip(matrices, before, strict=True)]
        sums = self._sum([*exact, *bases])
        for gradient, total in zip(exact, sums[: len(exact)], strict=True):
            gradient.copy_(total.div_(self.group.size()))
        bases = [torch.linalg.qr(basis).Q for basis in sums[len(exact) :]]
        factors = self._sum([m.T @ basis for m, basis in zip(matrices, bases, strict=True)])
        for (name, gradient), m, basis, factor, old in zip(
            low, matrices, bases, factors, before, strict=True
        ):
            approximation = basis @ factor.div_(self.group.size()).T
            gradient.copy_(approximation.view(gradient.shape))
            # After an overflow, whose step a loss scaler skips, everything stays as it was; on every rank alike.
            fine = factor.isfinite().all()
            error = self.errors.get(name)
            zero = torch.zeros_like(m) if error is None else error.to(m)
            self.errors[name] = torch.where(fine, m.sub_(approximation), zero)
            self.factors[name] = torch.where(fine, factor, old)

    def _shrinks(self, gradient: Tensor) -> bool:
        n, m = _matrix(gradient)
        return 2 * (n + m) * min(n, m, self.how.rank) < n * m

    def _corrected(self, name: str, gradient: Tensor) -> Tensor:
        matrix = gradient.to(_working(gradient), copy=True).reshape(_matrix(gradient))
        error = self.errors.get(name)
        return matrix if error is None else matrix.add_(error.to(matrix.device))

    def _factor(self, name: str, matrix: Tensor) -> Tensor:
        n, m = matrix.shape
        if name not in self.factors:  # drawn alike on every rank
            generator = torch.Generator().manual_seed(list(self._names.values()).index(name))
            self.factors[name] = torch.randn(m, min(n, m, self.how.rank), generator=generator)
        return self.factors[name].to(matrix)

    def _sum(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the sums over all ranks, in one all-reduce."""
        if not tensors:
            return []
        flat = torch.cat([t.to(_working(t)).flatten() for t in tensors])
        dist.all_reduce(flat, group=self.group)
        parts = flat.split([t.numel() for t in tensors])
        return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Return step, errors and factors by parameter; call it on every rank.

        The errors are their mean over the ranks: the sum of the gradients that they correct is the same,
        so a run may go on from it with any number of processes, exactly up to rounding.
        """
        errors = {name: error.clone() for name, error in self.errors.items()}
        for error in errors.values():
            dist.all_reduce(error, group=self.group)
            error.div_(self.group.size())
        return {"step": self.step, "errors": errors, "factors": dict(self.factors)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; factors of another rank than now start anew."""
        self.step = state_dict["step"]
        self.errors = dict(state_dict["errors"])
        self.factors = {
            name: factor for name, factor in state_dict["factors"].items() if factor.shape[1] == self.how.rank
        }


def make_comm_hook(
    how: str | Mapping[str, Any], group: dist.ProcessGroup, module: nn.Module
) -> HalfPrecision | PowerSGD:
    """Return what `comm_hook` names: `'bf16'`, `'fp16'`, `'powersgd'`, or a dict with such a `type`.

    Raises:
        ConfigError: none of these, or an option that it does not have.
    """
    given: Mapping[str, Any] = how if isinstance(how, Mapping) else {"type": how}
    kind = given.get("type")
    if kind not in _KINDS:
        hint = did_you_mean(kind, _KINDS) if isinstance(kind, str) else ""
        message = f"must be {', '.join(map(repr, _KINDS))} or a dict with such a 'type', not {how!r}{hint}"
        raise ConfigError(message, "comm_hook")
    rest = {key: value for key, value in given.items() if key != "type"}
    if kind == "powersgd":
        return PowerSGD(group, module.named_parameters(), options(PowerSGDOptions, rest, "comm_hook"))
    if rest:
        raise ConfigError(f"'{kind}' has no options, but got {sorted(rest)}", "comm_hook")
    return HalfPrecision(group, _HALVES[kind])


def run_comm_hook(state: HalfPrecision | PowerSGD, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Run a hook as `DistributedDataParallel.register_comm_hook(state, run_comm_hook)` wants it."""
    return state(bucket)


run_comm_hook.__annotations__.clear()  # DDP would compare these strings with the classes themselves


def _mean(buffer: Tensor, share: Tensor, group: dist.ProcessGroup) -> torch.futures.Future[Tensor]:
    """Return the future of `buffer` holding the sum of all ranks' shares."""
    work = dist.all_reduce(share, group=group, async_op=True)
    assert work is not None
    done: torch.futures.Future[Tensor] = work.get_future().then(lambda f: buffer.copy_(f.value()[0]))
    return done


def _matrix(tensor: Tensor) -> tuple[int, int]:
    n = tensor.shape[0] if tensor.ndim else 1
    return n, tensor.numel() // max(n, 1)


def _working(tensor: Tensor) -> torch.dtype:
    """Return the dtype to compute in: there is no QR of half precision."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _devices(tensor: Tensor) -> list[int | str | torch.device]:
    return [] if tensor.device.type == "cpu" else [tensor.device]
