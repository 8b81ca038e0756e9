"""`train_metrics_list` and `valid_metrics_list`: SuperGradients' metrics by its names, with values from 0 to 1."""

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
    """The mean over the classes of a share of their pixels, `part / whole` of `shares`.

    A class that is neither in the truth nor in the prediction counts in no mean, and neither does the ignored one.
    Therefore it makes no difference how many classes beyond those of the data `num_classes` announces.

    Args:
        num_classes: above every class id, of truth and prediction; it may count the ignored one.
        ignore_index: the target id of pixels that do not count; by default the data set's.

    Raises:
        ConfigError: fewer than two classes.
    """

    def __init__(self, num_classes: int, ignore_index: int | None = None) -> None:
        if num_classes < 2:
            raise ConfigError(f"must be at least 2, not {num_classes}", "num_classes")
        super().__init__(num_classes=num_classes, ignore_index=ignore_index)

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        """Return the mean, NaN without a single class, from the counts.

        Raises:
            DataError: targets or predictions out of range were counted.
        """
        matrix = self.matrix(results)
        hit, truth, guess = matrix.diagonal(), matrix.sum(axis=1), matrix.sum(axis=0)
        part, whole = self.shares(hit, truth + guess)
        counts = whole > 0
        if self.ignore_index is not None and 0 <= self.ignore_index < self.num_classes:
            counts[self.ignore_index] = False
        mean = float((part[counts] / whole[counts]).mean()) if counts.any() else float("nan")
        return {type(self).__name__: mean}

    def shares(self, hit: Any, both: Any) -> tuple[Any, Any]:
        """Return numerator and denominator of each class, given its right pixels, and its pixels in truth and guess."""
        raise NotImplementedError


@METRICS.register_module()
class IoU(_Overlap):
    """The mean intersection over union of the classes, from 0 to 1; see `_Overlap`."""

    def shares(self, hit: Any, both: Any) -> tuple[Any, Any]:
        """Return intersection and union."""
        return hit, both - hit


@METRICS.register_module()
class Dice(_Overlap):
    """The mean Dice coefficient of the classes, from 0 to 1; see `_Overlap`."""

    def shares(self, hit: Any, both: Any) -> tuple[Any, Any]:
        """Return twice the intersection, and the sum of both areas."""
        return 2 * hit, both


@METRICS.register_module()
class PixelAccuracy(CountingMetric):
    """The share of pixels whose class is right, from 0 to 1, over all pixels of the data set; NaN without a pixel.

    Predictions are class ids (N, H, W) or scores (N, classes, H, W).

    Args:
        ignore_label: the target id of pixels that do not count.
    """

    def __init__(self, ignore_label: int = -100) -> None:
        super().__init__()
        self.ignore_label = ignore_label

    def num_counts(self) -> int:
        """Return two: right pixels, and pixels that count."""
        return 2

    def count(self, counts: Tensor, preds: Tensor, targets: Tensor) -> None:
        """Add the pixels of one batch."""
        ids = preds.argmax(dim=1) if preds.ndim == targets.ndim + 1 else preds
        if ids.shape != targets.shape:
            raise DataError(
                f"PixelAccuracy got {describe(preds)} as preds for {describe(targets)} as targets; it needs class ids "
                "(N, H, W) or scores (N, classes, H, W), resized to the targets"
            )
        counted = targets != self.ignore_label
        counts.add_(torch.stack([((ids == targets) & counted).sum(), counted.sum()]))

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        """Return the share from the counts."""
        right, counted = results
        return {"PixelAccuracy": right / counted if counted else float("nan")}


@METRICS.register_module()
class Top1(evaluator.Accuracy):
    """SuperGradients' `Accuracy`: the share of samples whose likeliest class is right, from 0 to 1."""

    default_prefix = None
    k: ClassVar[int] = 1
    label: ClassVar[str] = "Accuracy"

    def __init__(self) -> None:
        super().__init__(topk=self.k)

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        """Return the share from the counts; NaN without any sample.

        Raises:
            DataError: targets out of range were counted.
        """
        (percent,) = super().compute_metrics(results).values()
        return {self.label: percent / 100}


Accuracy = Top1
"""By the name that scripts import. In METRICS that name is MMEngine's, which counts in percent."""


@METRICS.register_module()
class Top5(Top1):
    """The share of samples whose class is among the five likeliest, from 0 to 1."""

    k = 5
    label = "Top5"


def metric_config(
    entries: Sequence[Any] | None, place: str = "valid_metrics_list"
) -> list[dict[str, Any] | BaseMetric]:
    """Return the configurations of metrics for `METRICS`; metrics that are made already are returned as they are.

    `dist_sync_on_step` has no effect: counts are added over the ranks when they are read.

    Args:
        entries: objects (`BaseMetric` or torchmetrics); or names, `{Name: {arguments}}` or
            `{_target_: ..., arguments}`. Names are SuperGradients', or those of torchmetrics' classes.
        place: the list's own name, for errors.

    Raises:
        ConfigError: an entry is none of these, or has an argument that cannot be honoured.
        UnknownNameError: no metric has that name.
    """
    configs = []
    for index, entry in enumerate(entries or ()):
        where = f"training_params.{place}[{index}]"
        configs.append(_metric(entry, where) if isinstance(entry, str | Mapping) else _made(entry, where))
    return configs


def known_name(entry: Any) -> str | None:
    """Return what a validation calls the value of an entry; None of an object that decides it by itself."""
    if isinstance(entry, str | Mapping):
        return read_factory(entry, "training_params.valid_metrics_list")[0]
    kind = type(entry)
    return getattr(kind, "label", kind.__name__) if kind in (IoU, Dice, PixelAccuracy, Top1, Top5) else None


def _metric(entry: str | Mapping[str, Any], where: str) -> dict[str, Any]:
    name, arguments = read_factory(entry, where)
    kind = _NAMES.get(name, name)
    if kind not in METRICS:
        raise UnknownNameError(f"there is no metric '{name}'{did_you_mean(name, _NAMES)}", where)
    if kind not in _NAMES.values():
        return {"type": kind, **arguments}
    arguments.pop("dist_sync_on_step", None)
    for key, only in (("metrics_args_prep_fn", None), ("reduction", "elementwise_mean"), ("threshold", 0.5)):
        if (value := arguments.pop(key, only)) != only:
            raise ConfigError(f"can only be {only!r} here, not {value!r}", f"{where}.{key}")
    return {"type": kind, **arguments}


def _made(entry: Any, where: str) -> Any:
    if not isinstance(entry, BaseMetric) and not is_torchmetrics(entry):
        raise ConfigError(f"must be a metric, a name or a dict, not {entry!r}", where)
    return entry
