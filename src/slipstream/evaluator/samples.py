"""Read predictions and targets from the outputs of models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import DataError

__all__ = ["Pair", "describe", "read_pair", "read_tensors"]

Pair = tuple[Any, Any]


def read_pair(data_samples: Any, metric_name: str) -> Pair:
    """Return `(preds, targets)` for a batch.

    Args:
        data_samples: a dict with `preds` and `targets`, a tuple `(preds, targets)`, or a list with one such
            dict or tuple per sample. The tensors in a list are stacked.
        metric_name: name of the metric in error messages.

    Raises:
        DataError: if `data_samples` has a different structure.
    """
    if isinstance(data_samples, list) and data_samples and all(_is_sample(s) for s in data_samples):
        preds, targets = zip(*(_split(sample) for sample in data_samples), strict=True)
        return _stack(preds, metric_name), _stack(targets, metric_name)
    if _is_sample(data_samples):
        return _split(data_samples)
    raise DataError(
        f"{metric_name} got {describe(data_samples)}; in predict mode the model must return a dict with "
        "'preds' and 'targets', or a tuple (preds, targets)"
    )


def read_tensors(data_samples: Any, metric_name: str) -> tuple[Tensor, Tensor]:
    """Return `(preds, targets)` like `read_pair`, as detached tensors.

    Raises:
        DataError: if `read_pair` does not accept `data_samples`, if the predictions and targets are not tensors on the
            same device, or if the targets are not integers.
    """
    preds, targets = read_pair(data_samples, metric_name)
    for name, value in (("preds", preds), ("targets", targets)):
        if not isinstance(value, Tensor):
            raise DataError(f"{metric_name} requires {name} to be a tensor, not {describe(value)}")
    if preds.device != targets.device:
        raise DataError(
            f"{metric_name} got preds on {preds.device} and targets on {targets.device}; "
            "return both on the model's device"
        )
    if targets.is_floating_point() or targets.is_complex():
        raise DataError(
            f"{metric_name} requires integer class ids as targets, got {targets.dtype}; convert them with .long()"
        )
    return preds.detach(), targets.detach()


def describe(value: Any) -> str:
    """Return a description of `value` for an error message."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict with the keys {sorted(map(str, value))}"
    if isinstance(value, list | tuple):
        kinds = sorted({type(item).__name__ for item in value})
        return f"a {type(value).__name__} of length {len(value)} ({', '.join(kinds)})"
    return f"an object of type {type(value).__name__}"


def _is_sample(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "preds" in value and "targets" in value
    return isinstance(value, tuple) and len(value) == 2


def _split(sample: Any) -> Pair:
    if isinstance(sample, Mapping):
        return sample["preds"], sample["targets"]
    preds, targets = sample
    return preds, targets


def _stack(values: tuple[Any, ...], metric_name: str) -> Any:
    if all(isinstance(value, int | float) for value in values):
        return torch.tensor(values)
    if not all(isinstance(value, Tensor) for value in values):
        return list(values)  # for metrics that accept lists, for example lists of boxes
    if len({value.shape for value in values}) > 1:
        raise DataError(
            f"{metric_name} got samples of different sizes in one batch; set the batch size (or the chunk size) to 1"
        )
    return torch.stack(values)
