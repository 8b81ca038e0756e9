"""Find the metrics and losses that a run monitors under SuperGradients' names, and compute the losses in validation."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelError, SlipstreamError, UnknownNameError, did_you_mean
from slipstream.evaluator.metric import LossMetric
from slipstream.registry import METRICS, MODELS
from slipstream.training.losses import loss_config
from slipstream.training.metrics import NAMES, known_names
from slipstream.training.params import TrainingParams

__all__ = ["LOSSES_KEY", "ValidationLoss", "Watched", "loss_value", "train_metric", "watched_value"]

_CLASS_NAMES = {"CrossEntropy": "CrossEntropyLoss"}
"""SuperGradients' names for loss classes that have a different name in Slipstream."""
_TOTALS = {
    "DiceCEEdgeLoss": "loss",
    "KDLogitsLoss": "Loss",
    "STDCLoss": "loss",
    "SegKDLoss": "Total_Loss",
    "ShelfNetOHEMLoss": "Loss",
}
"""For each loss class that returns several values, SuperGradients' name for the total."""
LOSSES_KEY = "watched_losses"
"""Key of the losses in a model's predictions."""


@dataclass(frozen=True)
class Watched:
    """A metric or loss computed during validation."""

    name: str
    """Name of the metric or loss in the validation results."""
    is_loss: bool = False


def watched_value(requested: str, params: TrainingParams, config_path: str) -> Watched:
    """Return the metric or loss with this name, ignoring case and punctuation.

    The name of a loss is that of its class; a component is named `class/component`, and the component name alone is
    also accepted.

    Raises:
        UnknownNameError: if no metric or loss has this name, and no metric object chooses its names at run time.
    """
    metric_names = [known_names(entry) for entry in params.valid_metrics_list]
    names = [name for group in metric_names for name in group]
    for name in names:
        if _normalized(name) == _normalized(requested):
            return Watched(name)
    losses = [] if params.loss is None else _loss_names(loss_config(params.loss, params.criterion_params))
    for title in losses:
        if _normalized(requested) in (_normalized(title), _normalized(title.partition("/")[2])):
            return Watched(title, is_loss=True)
    if losses and re.fullmatch(rf"{re.escape(losses[0])}/\w+", requested):
        # The components are known only after the first validation run.
        return Watched(requested, is_loss=True)
    owner, slash, _ = requested.partition("/")
    if slash and owner in {*names} - NAMES.keys():
        return Watched(
            requested
        )  # an item of a torchmetrics value, known only after the first validation run
    if not all(metric_names):
        return Watched(requested)  # some metric objects choose their names in the first validation run
    raise UnknownNameError(
        f"no metric in valid_metrics_list and no loss is named '{requested}'"
        f"{did_you_mean(requested, [*names, *losses])} "
        f"(available: {', '.join([*names, *losses]) or 'none'})",
        config_path,
    )


def train_metric(requested: str, params: TrainingParams, config_path: str) -> str:
    """Return the name, with the `train/` prefix, of a metric in `train_metrics_list`, ignoring case and punctuation.

    Raises:
        UnknownNameError: if no training metric has this name, and none chooses its names at run time.
    """
    metric_names = [known_names(entry) for entry in params.train_metrics_list]
    names = [name for group in metric_names for name in group]
    found = [name for name in names if _normalized(name) == _normalized(requested)]
    if not found and all(metric_names):
        raise UnknownNameError(
            f"no metric in train_metrics_list is named '{requested}'{did_you_mean(requested, names)} "
            f"(available: {', '.join(names) or 'none'}); to monitor a loss, or a metric in valid_metrics_list, use "
            "the VALIDATION_EPOCH_END phase",
            config_path,
        )
    return f"train/{found[0] if found else requested}"


def loss_value(loss: Any, result: Any, title: str) -> Tensor:
    """Return the total or the component named `title` from the result of a loss.

    Args:
        loss: the loss, a module or a function.
        result: a scalar, a dict of scalars, or SuperGradients' pair (scalar, values to log).
        title: see `watched_value`.

    Raises:
        ModelError: if the loss has no such component.
    """
    component = title.partition("/")[2]
    values: dict[str, Tensor] = {}
    total: Tensor
    if isinstance(result, tuple):
        total, items = result
        names = getattr(loss, "component_names", None) or [f"loss_{index}" for index in range(len(items))]
        values = dict(zip(names, items, strict=False))
    elif isinstance(result, Mapping):
        values = dict(result)
        total = torch.stack([value for name, value in result.items() if "loss" in name]).sum()
    else:
        total = result
    if component in values:
        return values[component].detach()
    if component in ("", _TOTALS.get(type(loss).__name__)):
        return total.detach()
    raise ModelError(
        f"the loss has no component '{component}' in validation{did_you_mean(component, values)} (available: "
        f"{', '.join(values)}); evaluation uses only the main output, without auxiliary heads"
    )


@METRICS.register_module()
class ValidationLoss(LossMetric):
    """Average, over all samples, the losses that a `SupervisedModel` returns with its predictions.

    Args:
        names: names of the losses; see `watched_value`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = tuple(names)

    def process(self, data_batch: Any, data_samples: Any) -> None:
        """Store the losses of a batch without copying them from the device, and the number of samples in the batch."""
        losses = {name: data_samples[LOSSES_KEY][name] for name in self.names}
        super().process(data_batch, (losses, len(data_samples["targets"])))


def _loss_names(loss: Mapping[str, Any] | Callable[..., Any]) -> list[str]:
    """Return the names of a loss: its class, and the components that it declares."""
    try:
        built: Any = MODELS.build(loss) if isinstance(loss, Mapping) else loss
    except SlipstreamError:  # the Runner raises this error again, with the config path
        return []
    own = getattr(built, "__name__", type(built).__name__)
    components = getattr(built, "component_names", None) or ([_TOTALS[own]] if own in _TOTALS else [])
    name = _CLASS_NAMES.get(own, own)
    return [name, *(f"{name}/{component}" for component in components)]


def _normalized(name: str) -> str:
    """Return the name in lower case without punctuation; `pixel_accuracy` and `PixelAccuracy` are the same metric."""
    return "".join(filter(str.isalnum, name)).lower()
