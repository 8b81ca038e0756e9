"""`train_metrics_list` and `valid_metrics_list`: SuperGradients' metrics by name, with values from 0 to 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from slipstream import evaluator
from slipstream.errors import ConfigError, DataError, UnknownNameError, did_you_mean
from slipstream.evaluator import BaseMetric, CountingMetric, IoUMetric
from slipstream.evaluator.samples import describe
from slipstream.evaluator.torch_metric import is_torchmetrics
from slipstream.registry import METRICS
from slipstream.training.factories import read_factory

__all__ = ["Accuracy", "Dice", "IoU", "PixelAccuracy", "Top1", "Top5", "known_name", "metric_config"]

_NAMES = {"IoU": "IoU", "Dice": "Dice", "PixelAccuracy": "PixelAccuracy", "Accuracy": "Top1", "Top5": "Top5"}


class _Overlap(IoUMetric):
    """Mean over classes of the ratio returned by `ratio`.

    The ignored class, and classes that occur neither in the targets nor in the predictions, are excluded, so
    `num_classes` may be larger than the number of classes in the data.

    Args:
        num_classes: number of classes, greater than every class id. It may include the ignored class.
        ignore_index: target id of ignored pixels. Default: the dataset's.

    Raises:
        ConfigError: if `num_classes` is less than 2.
    """

    def __init__(self, num_classes: int, ignore_index: int | None = None) -> None:
        if num_classes < 2:
            raise ConfigError(f"must be at least 2, not {num_classes}", "num_classes")
        super().__init__(num_classes=num_classes, ignore_index=ignore_index)

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        """Return the mean from the counts, or NaN if no class occurs.

        Raises:
            DataError: if targets or predictions were out of range.
        """
        matrix = self.matrix(results)
        hit, truth, guess = matrix.diagonal(), matrix.sum(axis=1), matrix.sum(axis=0)
        numerator, denominator = self.ratio(hit, truth + guess)
        counts = denominator > 0
        if self.ignore_index is not None and 0 <= self.ignore_index < self.num_classes:
            counts[self.ignore_index] = False
        mean = float((numerator[counts] / denominator[counts]).mean()) if counts.any() else float("nan")
        return {type(self).__name__: mean}

    def ratio(self, hit: Any, both: Any) -> tuple[Any, Any]:
        """Return the numerator and the denominator per class.

        Args:
            hit: number of correct pixels per class.
            both: number of target pixels plus number of predicted pixels per class.
        """
        raise NotImplementedError


@METRICS.register_module()
class IoU(_Overlap):
    """Mean intersection over union of the classes, from 0 to 1. See `_Overlap`."""

    def ratio(self, hit: Any, both: Any) -> tuple[Any, Any]:
        """Return the intersection and the union."""
        return hit, both - hit


@METRICS.register_module()
class Dice(_Overlap):
    """Mean Dice coefficient of the classes, from 0 to 1. See `_Overlap`."""

    def ratio(self, hit: Any, both: Any) -> tuple[Any, Any]:
        """Return twice the intersection, and the sum of both areas."""
        return 2 * hit, both


@METRICS.register_module()
class PixelAccuracy(CountingMetric):
    """The fraction of correctly classified pixels in the dataset, from 0 to 1, or NaN if there are none.

    Predictions are class ids (N, H, W) or scores (N, classes, H, W).

    Args:
        ignore_label: target id of ignored pixels.
    """

    def __init__(self, ignore_label: int = -100) -> None:
        super().__init__()
        self.ignore_label = ignore_label

    def num_counts(self) -> int:
        """Return 2: correct pixels and counted pixels."""
        return 2

    def count(self, counts: Tensor, preds: Tensor, targets: Tensor) -> None:
        """Add the pixels of one batch."""
        ids = preds.argmax(dim=1) if preds.ndim == targets.ndim + 1 else preds
        if ids.shape != targets.shape:
            raise DataError(
                f"PixelAccuracy got {describe(preds)} as preds and {describe(targets)} as targets; it requires "
                "class ids (N, H, W) or scores (N, classes, H, W) with the size of the targets"
            )
        counted = targets != self.ignore_label
        counts.add_(torch.stack([((ids == targets) & counted).sum(), counted.sum()]))

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        """Return the fraction from the counts."""
        right, counted = results
        return {"PixelAccuracy": right / counted if counted else float("nan")}


@METRICS.register_module()
class Top1(evaluator.Accuracy):
    """SuperGradients' `Accuracy`: the fraction of samples whose most likely class is correct, from 0 to 1."""

    default_prefix = None
    k: ClassVar[int] = 1
    label: ClassVar[str] = "Accuracy"

    def __init__(self) -> None:
        super().__init__(topk=self.k)

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        """Return the fraction from the counts, or NaN if there are no samples.

        Raises:
            DataError: if targets were out of range.
        """
        (percent,) = super().compute_metrics(results).values()
        return {self.label: percent / 100}


Accuracy = Top1
"""Alias for scripts. In METRICS, `Accuracy` is MMEngine's metric, which returns percent."""


@METRICS.register_module()
class Top5(Top1):
    """The fraction of samples whose class is among the five most likely classes, from 0 to 1."""

    k = 5
    label = "Top5"


def metric_config(
    entries: Sequence[Any] | None, key: str = "valid_metrics_list"
) -> list[dict[str, Any] | BaseMetric]:
    """Return the configurations of metrics for `METRICS`. Metric objects are returned unchanged.

    The `dist_sync_on_step` argument has no effect, because counts are summed over all ranks when they are read.

    Args:
        entries: objects (`BaseMetric` or torchmetrics); or names, `{Name: {arguments}}` or
            `{_target_: ..., arguments}`. Names are those of SuperGradients or torchmetrics.
        key: name of the list, for errors.

    Raises:
        ConfigError: if an entry has none of these forms, or an argument is not supported.
        UnknownNameError: if no metric has that name.
    """
    configs = []
    for index, entry in enumerate(entries or ()):
        config_path = f"training_params.{key}[{index}]"
        configs.append(
            _metric(entry, config_path) if isinstance(entry, str | Mapping) else _checked(entry, config_path)
        )
    return configs


def known_name(entry: Any) -> str | None:
    """Return the name of the metric's value, or None if the object determines the name itself."""
    if isinstance(entry, str | Mapping):
        return read_factory(entry, "training_params.valid_metrics_list")[0]
    kind = type(entry)
    return getattr(kind, "label", kind.__name__) if kind in (IoU, Dice, PixelAccuracy, Top1, Top5) else None


def _metric(entry: str | Mapping[str, Any], config_path: str) -> dict[str, Any]:
    name, arguments = read_factory(entry, config_path)
    kind = _NAMES.get(name, name)
    if kind not in METRICS:
        raise UnknownNameError(f"no metric is named '{name}'{did_you_mean(name, _NAMES)}", config_path)
    if kind not in _NAMES.values():
        return {"type": kind, **arguments}
    arguments.pop("dist_sync_on_step", None)
    for key, only in (("metrics_args_prep_fn", None), ("reduction", "elementwise_mean"), ("threshold", 0.5)):
        if (value := arguments.pop(key, only)) != only:
            raise ConfigError(f"must be {only!r}, not {value!r}", f"{config_path}.{key}")
    return {"type": kind, **arguments}


def _checked(entry: Any, config_path: str) -> Any:
    if not isinstance(entry, BaseMetric) and not is_torchmetrics(entry):
        raise ConfigError(f"must be a metric, a name or a dict, not {entry!r}", config_path)
    return entry
