"""The sum of a model's losses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from slipstream.errors import LossError

__all__ = ["AVERAGED_OVER", "Losses", "sum_losses"]

AVERAGED_OVER = "averaged_over"
"""Name of the entry with the number of objects, such as tokens or pixels, of which the loss of a batch is the mean."""

Losses = Mapping[str, Tensor | Iterable[Tensor]]


def sum_losses(losses: Losses) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sum of all entries whose name contains `loss`, and the values to log as detached 0-dim tensors.

    All entries are logged. The first value is `loss`: the entry with this name or, if there is none, the sum.

    Raises:
        LossError: no entry's name contains `loss`, or an entry is neither a scalar tensor nor a list of scalar tensors.
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
        raise LossError(
            f"no entry has 'loss' in its name, so there is nothing to minimize; got {sorted(losses)}. Add 'loss' to "
            "the name of the entry to minimize"
        )
    return total, {"loss": total.detach(), **logs}


def _scalar(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        if value.ndim == 0:
            return value
        if value.numel() == 1:
            return value.reshape(())
        shape = tuple(value.shape)
        raise LossError(f"'{name}' has shape {shape}, but a loss must be a scalar; use its mean() or sum()")
    if isinstance(value, list | tuple) and value:
        scalars = [_scalar(f"{name}[{i}]", item) for i, item in enumerate(value)]
        return sum(scalars[1:], start=scalars[0])
    raise LossError(f"'{name}' must be a scalar tensor or a list of scalar tensors, not {value!r}")
