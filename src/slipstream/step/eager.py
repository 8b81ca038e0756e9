"""One training step, eagerly: forward, loss, backward, gradient sync, clipping, optimizer.

The step depends on neither Runner nor registry; it takes a model and an optimizer wrapper, and returns
device tensors that nobody has read yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from slipstream.errors import LossError

if TYPE_CHECKING:
    from slipstream.optim.optim_wrapper import OptimWrapper

__all__ = ["EagerStep", "Step", "sum_losses"]

Losses = Mapping[str, Tensor | Iterable[Tensor]]


class Step(Protocol):
    """One training step: takes a batch, moves the weights, returns 0-dim tensors that stay on the device."""

    def __call__(self, batch: Any) -> dict[str, Tensor]:
        """Train on `batch` and return what to log, `loss` among it."""
        ...


class EagerStep:
    """The step as PyTorch's autograd engine runs it.

    Args:
        forward: `forward(batch) -> losses`, a dict of scalar tensors; those with `loss` in their name
            are summed. It may call a DDP-wrapped model.
        model: the module that `forward` calls, wrapped or not, whose gradient sync can be held back.
        optim: moves the weights.
        reduce: turns the losses into the one to minimise and the values to log; by default their sum.
    """

    def __init__(
        self,
        forward: Callable[[Any], Losses],
        model: nn.Module,
        optim: OptimWrapper,
        reduce: Callable[[Losses], tuple[Tensor, dict[str, Tensor]]] | None = None,
    ) -> None:
        self.forward = forward
        self.model = model
        self.optim = optim
        self.reduce = reduce or sum_losses

    def __call__(self, batch: Any) -> dict[str, Tensor]:
        """Train on one batch."""
        optim = self.optim
        with optim.optim_context(self.model):  # autocast; no gradient sync inside an accumulation window
            losses = self.forward(batch)
        loss, logs = self.reduce(losses)
        optim.update_params(loss)  # backward; at a window's end: unscale, clip, step, zero_grad
        if optim.grad_norm is not None:
            logs["grad_norm"] = optim.grad_norm
        return logs


def sum_losses(losses: Losses) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sum of all losses (with gradient), and detached 0-dim values to log, `loss` first.

    `loss` is logged as the sum, unless an entry has that very name; entries without `loss` in their name
    are logged only.

    Raises:
        LossError: no entry is a loss, or one is not a scalar tensor (or a list of them).
    """
    if not isinstance(losses, Mapping):
        raise LossError(
            f"forward in mode 'loss' must return a dict of scalar tensors such as {{'loss': loss}}, "
            f"not {type(losses).__name__}"
        )
    total: Tensor | None = None
    logs: dict[str, Tensor] = {}
    for name, value in losses.items():
        scalar = _scalar(name, value)
        logs[name] = scalar.detach()
        if "loss" in name:
            total = scalar if total is None else total + scalar
    if total is None:
        raise LossError(f"no entry has 'loss' in its name, so nothing can be minimised; got {sorted(losses)}")
    return total, {"loss": total.detach(), **logs}


def _scalar(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        if value.ndim == 0:
            return value
        if value.numel() == 1:
            return value.reshape(())
        shape = tuple(value.shape)
        raise LossError(f"'{name}' has the shape {shape}; a loss is a scalar: take its mean() or sum()")
    if isinstance(value, list | tuple) and value:
        parts = [_scalar(f"{name}[{i}]", part) for i, part in enumerate(value)]
        return sum(parts[1:], start=parts[0])
    raise LossError(f"'{name}' must be a scalar tensor or a list of them, not {value!r}")
