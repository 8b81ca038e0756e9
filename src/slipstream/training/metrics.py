"""`train_metrics_list` and `valid_metrics_list`: SuperGradients' metrics by name, with values from 0 to 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream import evaluator
from slipstream.errors import ConfigError, DataError, UnknownNameError, did_you_mean
from slipstream.evaluator import BaseMetric, CountingMetric, IoUMetric
from slipstream.evaluator.evaluator import is_torchmetrics, is_torchmetrics_class
from slipstream.registry import METRICS
from slipstream.training.params import pop_fixed, read_factory

_SAME = ("IoU", "Dice", "BinaryIOU", "BinaryDice", "PixelAccuracy", "Top5")
# Maps SuperGradients' metric names to names in METRICS.
NAMES = {**{name: name for name in _SAME}, "Accuracy": "Top1"}
IgnoredIds = int | Sequence[int] | None


class _Overlap(IoUMetric):
    """Mean over the classes of the ratio that `ratio` defines.

    The ignored class, and classes that occur neither in the targets nor in the predictions, are excluded, so
    `num_classes` may be larger than the number of classes in the data.

    Args:
        num_classes: number of classes, greater than every class id. It may include the ignored class.
        ignore_index: target id of ignored pixels, or several ids. Default: the dataset's `ignore_index`.

    Raises:
        ConfigError: if `num_classes` is less than 2.
    """

    def __init__(self, num_classes: int, ignore_index: IgnoredIds = None) -> None:
        if num_classes < 2:
            raise ConfigError("must be at least 2; for one channel, use a binary metric", "num_classes")
        ids = _ids(ignore_index)
        super().__init__(num_classes=num_classes, ignore_index=ids[0] if ids else None)
        self._other_ids = ids[1:]

    def count(self, counts: Tensor, preds: Tensor, targets: Tensor) -> None:
        """Add the pixels of one batch; see `IoUMetric.count`."""
        super().count(counts, preds, _merge_ids(targets, self.ignore_index, self._other_ids))

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        """Compute the mean from the counts; the result is NaN if no class occurs."""
        return {type(self).__name__: _mean(self.per_class_ratios(results))}

    def per_class_ratios(self, results: list[Any]) -> npt.NDArray[np.float64]:
        """Return the ratio of each class, or NaN for classes that are ignored or do not occur."""
        matrix = self.matrix(results)
        hit, truth, guess = matrix.diagonal(), matrix.sum(axis=1), matrix.sum(axis=0)
        numerator, denominator = self.ratio(hit, truth + guess)
        valid = denominator > 0
        for ignored in (self.ignore_index, *self._other_ids):
            if ignored is not None and 0 <= ignored < self.num_classes:
                valid[ignored] = False
        ratios = np.full(self.num_classes, np.nan)
        np.divide(numerator, denominator, out=ratios, where=valid)
        return ratios

    def ratio(self, hit: Any, total: Any) -> tuple[Any, Any]:
        """Return the numerator and the denominator per class.

        Args:
            hit: number of correct pixels per class.
            total: number of target pixels plus number of predicted pixels per class.
        """
        raise NotImplementedError


@METRICS.register_module()
class IoU(_Overlap):
    """Intersection over union, averaged over the classes, from 0 to 1. See `_Overlap`."""

    def ratio(self, hit: Any, total: Any) -> tuple[Any, Any]:
        """Return the intersection and the union."""
        return hit, total - hit


@METRICS.register_module()
class Dice(_Overlap):
    """Dice coefficient, averaged over the classes, from 0 to 1. See `_Overlap`."""

    def ratio(self, hit: Any, total: Any) -> tuple[Any, Any]:
        """Return twice the intersection, and the sum of both areas."""
        return 2 * hit, total


class _Binary(_Overlap):
    """The overlap ratios for a mask (`target`) and for the remaining pixels (`background`), and their mean.

    A pixel belongs to the predicted mask if the sigmoid of its score is at least `threshold`. If the mask or the
    background occurs neither in the targets nor in the predictions, its ratio is NaN and is excluded from the mean.

    Args:
        dist_sync_on_step: has no effect, because counts are summed across all ranks when they are read.
        ignore_index: target id of ignored pixels, or several ids. Default: the dataset's `ignore_index`.
        threshold: probability threshold, between 0 and 1.
        metrics_args_prep_fn: must be None.
    """

    label: ClassVar[str]
    uses_scores = True

    def __init__(
        self,
        dist_sync_on_step: bool = True,
        ignore_index: IgnoredIds = None,
        threshold: float = 0.5,
        metrics_args_prep_fn: None = None,
    ) -> None:
        if not 0 < threshold < 1:
            raise ConfigError(f"must be between 0 and 1, not {threshold}", "threshold")
        if metrics_args_prep_fn is not None:
            raise ConfigError("must be None; define your own metric instead", "metrics_args_prep_fn")
        super().__init__(2, ignore_index)
        self.threshold = threshold

    @classmethod
    def value_names(cls) -> tuple[str, ...]:
        """Return the names of the metric's values."""
        return tuple(f"{part}_{cls.label}" for part in ("target", "background", "mean"))

    def process(self, data_batch: Any, data_samples: Any) -> None:
        """Count the pixels of one batch. If the model returns `scores`, they are used instead of `preds`."""
        if isinstance(data_samples, Mapping) and "scores" in data_samples:
            data_samples = {**data_samples, "preds": data_samples["scores"]}
        super().process(data_batch, data_samples)

    def count(self, counts: Tensor, preds: Tensor, targets: Tensor) -> None:
        """Add the pixels of one batch. Predictions are scores (N, H, W) or (N, 1, H, W), or ids 0 and 1 (N, H, W).

        Raises:
            DataError: if `threshold` is not 0.5 and the predictions are class ids, to which it cannot be applied.
        """
        if preds.ndim == targets.ndim + 1 and preds.shape[1] == 1:
            preds = preds.squeeze(1)
        if preds.is_floating_point():
            preds = (preds.float().sigmoid() >= self.threshold).long()
        elif self.threshold != 0.5:
            raise DataError(f"threshold={self.threshold} requires floating-point scores, not class ids")
        super().count(counts, preds, targets)

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        """Compute the values from the counts."""
        background, target = self.per_class_ratios(results).tolist()
        return dict(zip(self.value_names(), (target, background, _mean(background, target)), strict=True))


@METRICS.register_module()
class BinaryIOU(_Binary, IoU):
    """Intersection over union for a mask and for the background, from 0 to 1. See `_Binary`."""

    label = "IOU"


@METRICS.register_module()
class BinaryDice(_Binary, Dice):
    """Dice coefficients for a mask and for the background, from 0 to 1. See `_Binary`."""

    label = "Dice"


@METRICS.register_module()
class PixelAccuracy(CountingMetric):
    """The fraction of correctly classified pixels in the dataset, from 0 to 1, or NaN if no pixels are counted.

    Predictions are class ids (N, H, W), or scores (N, classes, H, W) for at least two classes.

    Args:
        ignore_label: target id of ignored pixels, or several ids.
    """

    def __init__(self, ignore_label: IgnoredIds = -100) -> None:
        super().__init__()
        ids = _ids(ignore_label) or (-100,)
        self.ignore_label, self._other_ids = ids[0], ids[1:]

    def num_counts(self) -> int:
        """Return 2: one count for correct pixels, and one for all counted pixels."""
        return 2

    def count(self, counts: Tensor, preds: Tensor, targets: Tensor) -> None:
        """Add the pixels of one batch.

        Raises:
            DataError: if predictions and targets differ in size, or scores have only one channel.
        """
        has_scores = preds.ndim > targets.ndim and preds.shape[1] > 1  # argmax of one channel is always 0
        ids = preds.argmax(dim=1) if has_scores else preds
        if ids.shape != targets.shape:
            raise DataError(
                f"PixelAccuracy requires class ids, or scores for at least two classes, of the targets' size "
                f"{tuple(targets.shape)}, not predictions of shape {tuple(preds.shape)}"
            )
        counted = _merge_ids(targets, self.ignore_label, self._other_ids) != self.ignore_label
        counts.add_(torch.stack([((ids == targets) & counted).sum(), counted.sum()]))

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        """Compute the fraction from the counts."""
        correct, counted = results
        return {"PixelAccuracy": correct / counted if counted else float("nan")}


@METRICS.register_module()
class Top1(evaluator.Accuracy):
    """SuperGradients' `Accuracy`: the fraction of samples whose most likely class is correct, from 0 to 1."""

    default_prefix = None
    k: ClassVar[int] = 1
    label: ClassVar[str] = "Accuracy"

    def __init__(self) -> None:
        super().__init__(topk=self.k)

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        """Compute the fraction from the counts; the result is NaN if there are no samples."""
        (percent,) = super().compute_metrics(results).values()
        return {self.label: percent / 100}


Accuracy = Top1
"""Alias for scripts. In METRICS, `Accuracy` is MMEngine's metric, which returns percentages."""


@METRICS.register_module()
class Top5(Top1):
    """The fraction of samples whose class is among the five most likely classes, from 0 to 1."""

    k = 5
    label = "Top5"


def metric_config(entries: Sequence[Any] | None, key: str = "valid_metrics_list") -> list[Any]:
    """Return metric configurations for `METRICS`. Metric objects are returned unchanged.

    The `dist_sync_on_step` argument has no effect, because counts are summed across all ranks when they are read.

    Args:
        entries: each entry is a metric object (`BaseMetric` or torchmetrics), a name, `{Name: {arguments}}` or
            `{_target_: ..., arguments}`. Valid names are those of SuperGradients and torchmetrics.
        key: name of the list, for error messages.

    Raises:
        ConfigError: if an entry has none of these forms, or an argument is not supported.
        UnknownNameError: if no metric has that name.
    """
    return [_metric(entry, f"training_params.{key}[{i}]") for i, entry in enumerate(entries or ())]


def _metric(entry: Any, config_path: str) -> Any:
    if isinstance(entry, BaseMetric) or is_torchmetrics(entry):
        return entry
    name, arguments = read_factory(entry, config_path)
    kind = NAMES.get(name, name)
    if kind not in METRICS:
        raise UnknownNameError(f"no metric is named '{name}'{did_you_mean(name, NAMES)}", config_path)
    if kind in NAMES.values():
        arguments.pop("dist_sync_on_step", None)
        threshold = {} if kind in ("BinaryIOU", "BinaryDice") else {"threshold": 0.5}
        fixed = {"metrics_args_prep_fn": None, "reduction": "elementwise_mean", **threshold}
        pop_fixed(arguments, fixed, config_path)
    return {"type": kind, **arguments}


def known_names(entry: Any) -> tuple[str, ...]:
    """Return the names of the metric's values, or an empty tuple if the metric determines its names at run time.

    The value of a torchmetrics metric is named after its class. If the value is a dict or a vector, its items are named
    `class/key`; see `TorchMetric`.
    """
    kind: Any = type(entry)
    if isinstance(entry, str | Mapping):
        name = read_factory(entry, "training_params.valid_metrics_list")[0]
        kind = METRICS.get(NAMES.get(name, name))
    if kind in (BinaryIOU, BinaryDice):
        return kind.value_names()
    if kind in (IoU, Dice, PixelAccuracy, Top1, Top5):
        return (getattr(kind, "label", kind.__name__),)
    return (kind.__name__,) if is_torchmetrics_class(kind) else ()


def _ids(ignored: IgnoredIds) -> tuple[int, ...]:
    """Return the ids of ignored pixels as a tuple."""
    if ignored is None or isinstance(ignored, int):
        return () if ignored is None else (ignored,)
    return tuple(ignored)


def _merge_ids(targets: Tensor, first: int | None, others: Sequence[int]) -> Tensor:
    """Return the targets with the ids `others` replaced by `first`."""
    if first is None or not others:
        return targets
    merged = targets.long()
    for other in others:
        merged = merged.masked_fill(merged == other, first)
    return merged


def _mean(*values: Any) -> float:
    """Return the mean of the values that are not NaN, or NaN if there are none."""
    known = np.array(values, dtype=np.float64).ravel()
    known = known[~np.isnan(known)]
    return float(known.mean()) if known.size else float("nan")
