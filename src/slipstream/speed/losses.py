"""Compute the losses of a batch with `loss_fn(outputs, targets)`, `compute_loss(model, batch)` or the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from slipstream.errors import ConfigError, DataError, LossError
from slipstream.step import sum_losses

__all__ = ["BatchLoss", "LossFunction", "ModelLosses", "outputs_and_targets", "read_losses"]

LossFunction = Callable[[Any, Any], Tensor | Mapping[str, Tensor]]
"""Type of `loss_fn(outputs, targets)`."""
BatchLoss = Callable[[nn.Module, Any], Tensor | Mapping[str, Tensor]]
"""Type of `compute_loss(model, batch)`."""
ModelLosses = Callable[[nn.Module, Any], tuple[Tensor, dict[str, Tensor]]]
"""Type of `losses(module, inputs)`, which returns the loss to minimize and the values to log."""


def read_losses(loss_fn: LossFunction | None, compute_loss: BatchLoss | None) -> ModelLosses:
    """Return the function that computes the loss of a batch and the values to log.

    Raises:
        ConfigError: both arguments are set, or one of them is not a function.
    """
    for name, function in {"loss_fn": loss_fn, "compute_loss": compute_loss}.items():
        if function is not None and (not callable(function) or isinstance(function, type)):
            message = f"must be a function, or None if the model returns its loss, not {function!r}"
            raise ConfigError(message, name)
    if loss_fn is not None and compute_loss is not None:
        raise ConfigError("loss_fn and compute_loss exclude each other; remove one of them", "compute_loss")
    if compute_loss is not None:
        return lambda module, batch: _sum(compute_loss(module, batch))
    if loss_fn is not None:
        return lambda module, batch: _sum(loss_fn(*outputs_and_targets(module, batch)))
    return _own_loss


def outputs_and_targets(module: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Return the module's outputs for a batch, and the targets, or the whole batch if it is a dict.

    Raises:
        DataError: the batch is neither a dict nor a list or tuple of at least two elements.
    """
    if isinstance(batch, Mapping):
        return module(**batch), batch
    if not isinstance(batch, list | tuple) or len(batch) < 2:
        raise DataError(
            f"a batch must be (inputs, targets) or a dict, not a {type(batch).__name__}; change the dataset or "
            "collate_fn of the loader"
        )
    return module(*batch[:-1]), batch[-1]


def _own_loss(module: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss that the model computes from a batch, and the values to log.

    The model returns the loss as a tensor, or as the entry or attribute `loss` of its output, which is assumed to
    include the other losses. If a dict output has no key `loss`, the loss is the sum of the entries whose name contains
    `loss`. The other 0-dim tensors of a dict output are logged.

    Raises:
        LossError: the output contains no loss.
    """
    if isinstance(batch, Mapping):
        outputs = module(**batch)
    else:
        outputs = module(batch) if isinstance(batch, Tensor) else module(*batch)
    if isinstance(outputs, Tensor):
        return sum_losses({"loss": outputs})
    entries = dict(outputs) if isinstance(outputs, Mapping) else {}
    tensors = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
    loss = entries.get("loss", getattr(outputs, "loss", None))
    if isinstance(loss, Tensor):
        total, logs = sum_losses({"loss": loss})
        scalars = {name: value.detach() for name, value in tensors.items() if value.ndim == 0}
        return total, {**logs, **scalars, "loss": logs["loss"]}
    if any("loss" in str(name) for name in tensors):
        return sum_losses(tensors)
    keys = f" with the keys {sorted(map(str, entries))}" if entries else ""
    raise LossError(
        f"the model returned an object of type {type(outputs).__name__}{keys}, but no loss; return a scalar, a "
        "dict with the key 'loss' or an object with the attribute 'loss' (for transformers, set return_dict=True and "
        "labels in the batch), or pass loss_fn or compute_loss"
    )


def _sum(loss: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss to minimize and the values to log, given the result of a loss function.

    Raises:
        LossError: the result is neither a tensor nor a dict, or it is unclear whether the entry `loss` is the sum of
            the other losses or one of them.
    """
    if isinstance(loss, Tensor):
        return (loss, {"loss": loss.detach()}) if loss.ndim == 0 else sum_losses({"loss": loss})
    if not isinstance(loss, Mapping):
        raise LossError(
            "the loss function must return a scalar tensor or a dict of scalar tensors, not "
            f"{type(loss).__name__}; return its attribute 'loss' if it has one, and do not call item()"
        )
    others = [name for name in loss if name != "loss" and "loss" in name]
    if others and "loss" in loss:
        raise LossError(
            f"the dict contains 'loss' and {others}, and all of them would be summed. If 'loss' is the total, remove "
            f"it, or log {others} under names without 'loss'. Otherwise, rename 'loss'"
        )
    return sum_losses(loss)
