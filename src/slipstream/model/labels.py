"""Detect targets and class weights that do not match the network's classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import ConfigError, DataError

__all__ = ["check_class_weights", "check_labels", "wrong_label"]


def check_labels(loss: nn.Module, scores: Any, targets: Tensor) -> None:
    """Raise a DataError if a target is neither one of the network's classes nor the ignored value.

    On an accelerator, an invalid target would terminate the process without an error that reports the value. This check
    causes a device synchronization, so `Task` checks only one batch. Losses other than `CrossEntropyLoss` and
    `NLLLoss` may interpret targets differently, so their targets are checked only if they set `takes_class_ids = True`.

    Args:
        loss: the loss module.
        scores: the network's main output, (N, classes, ...).
        targets: integer class ids, or class probabilities (not checked).
    """
    if not _takes_class_ids(loss) or not isinstance(scores, Tensor) or scores.ndim < 2:
        return
    # Tensors without data, such as fake tensors, cannot be checked.
    if targets.is_floating_point() or type(targets) is not Tensor or targets.is_meta:
        return
    wrong = (targets < 0) | (targets >= scores.shape[1])
    wrong &= targets != getattr(loss, "ignore_index", -100)
    if wrong.any():
        values = torch.unique(targets[wrong])[:5].tolist()
        sample = int(wrong.nonzero()[0, 0])
        description = f"{', '.join(map(str, values))} (first in sample {sample} of the batch)"
        raise wrong_label(loss, scores, description)


def check_class_weights(loss: nn.Module, scores: Any) -> None:
    """Raise a ConfigError unless the loss has one class weight (`loss.weight`) per class of the network, or no weights.

    torch would raise an error that does not name the configuration key.

    Args:
        loss: the loss module.
        scores: the network's main output, (N, classes, ...).
    """
    weight = getattr(loss, "weight", None) if _takes_class_ids(loss) else None
    if not isinstance(weight, Tensor) or not isinstance(scores, Tensor) or scores.ndim < 2:
        return
    if weight.shape != scores.shape[1:2]:
        raise ConfigError(
            f"{type(loss).__name__} has {weight.numel()} class weights, but the network has {scores.shape[1]} classes; "
            "set one weight per class",
            "model.loss.weight",
        )


def _takes_class_ids(loss: nn.Module) -> bool:
    known = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)
    return known or bool(getattr(loss, "takes_class_ids", False))


def wrong_label(loss: nn.Module, scores: Tensor, description: str) -> DataError:
    """Return the error for targets that are not among the network's classes."""
    ignored = getattr(loss, "ignore_index", None)
    ignores = f", and the loss ignores {ignored}" if ignored is not None else ""
    return DataError(
        f"a target is not one of the network's classes: {description}; the classes are 0 to {scores.shape[1] - 1}"
        f"{ignores}. Increase num_classes, map the dataset's labels to the classes, or set the loss's ignore_index to "
        "the value used for targets without a class, including padded pixels (fill_mask of the padding transforms)"
    )
