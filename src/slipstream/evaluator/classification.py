"""Classification accuracy, counted on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ConfigError, DataError
from slipstream.evaluator.metric import CountingMetric, describe
from slipstream.registry import METRICS
from slipstream.typecheck import PositiveInt, check

# Maximum number of dataset classes for which a confusion matrix is computed if `num_classes` is not set.
_MAX_CLASSES = 200


@METRICS.register_module()
class Accuracy(CountingMetric):
    """Top-k accuracy in percent, reported as `accuracy/top1` and so on.

    The predictions are scores `(N, classes)`, or class ids `(N,)` if `topk` is `(1,)`. The targets are class ids
    `(N,)`.

    Args:
        topk: the values of k.
        num_classes: the number of classes in the confusion matrix, which the run's report shows with a per-class
            table. The default is the length of the dataset's `classes`. With the default, no matrix is computed if
            there are more than 200 classes, or if the model has a different number of classes.
        kwargs: see `BaseMetric`.

    Raises:
        ConfigError: if `topk` is empty or contains a value below 1, or `num_classes` is below 1.
        DataError: if the shapes do not match, there are fewer classes than k, or (in `evaluate`) class ids are out of
            range.
    """

    default_prefix: str | None = "accuracy"

    def __init__(
        self, topk: int | tuple[int, ...] = (1,), num_classes: PositiveInt | None = None, **kwargs: Any
    ) -> None:
        check(num_classes, PositiveInt | None, "num_classes")
        super().__init__(**kwargs)
        self.topk = (topk,) if isinstance(topk, int) else tuple(topk)
        if not self.topk or min(self.topk) < 1:
            raise ConfigError(f"must contain one or more positive integers, got {topk!r}", "topk")
        self.num_classes = num_classes

    def num_counts(self) -> int:
        """Return the number of counts.

        There is one for each k, one for the samples, one for the invalid ids, and one for each cell of the confusion
        matrix.
        """
        return len(self.topk) + 2 + self._classes**2

    @property
    def _classes(self) -> int:
        """The number of classes in the confusion matrix, the same on all ranks; 0 if there is no matrix."""
        names = (self.dataset_meta or {}).get("classes")
        num_names = len(names) if isinstance(names, list | tuple) and len(names) <= _MAX_CLASSES else 0
        return self.num_classes or num_names

    def count(self, counts: Tensor, preds: Tensor, targets: Tensor) -> None:
        """Add the samples of one batch to `counts`."""
        if targets.ndim != 1 or preds.shape[:1] != targets.shape or preds.ndim > 2:
            raise DataError(
                f"Accuracy got {describe(preds)} as preds and {describe(targets)} as targets; "
                "it requires scores (N, classes) or class ids (N,), and targets (N,)"
            )
        # Small integer types would overflow in comparisons with the number of classes, and in the confusion matrix.
        preds, targets = (ids if ids.is_floating_point() else ids.long() for ids in (preds, targets))
        hits = self._hits(preds, targets)
        bad = targets < 0
        if preds.ndim == 2:
            bad = bad | (targets >= preds.shape[1])
        # If `counts` was created before the dataset's classes were known, it contains no matrix.
        if len(pairs := counts[len(self.topk) + 2 :]):
            invalid = self._count_pairs(pairs, preds, targets, round(len(pairs) ** 0.5))
            bad = bad if self.num_classes is None else bad | invalid
        counts[: len(self.topk)].add_(torch.stack([hits[:, :k].sum() for k in self.topk]))
        counts[len(self.topk)].add_(len(targets))
        counts[len(self.topk) + 1].add_(bad.sum())

    def _count_pairs(self, counts: Tensor, preds: Tensor, targets: Tensor, classes: int) -> Tensor:
        """Add the pairs (target, prediction) to the confusion matrix; return a mask of the pairs with invalid ids."""
        if preds.ndim == 2:
            if preds.shape[1] != classes:
                if self.num_classes is None:
                    return torch.zeros_like(targets, dtype=torch.bool)
                raise DataError(
                    f"Accuracy got scores for {preds.shape[1]} classes, but its num_classes is {classes}; set "
                    "num_classes to the model's number of classes"
                )
            preds = preds.argmax(1)
        bad = (targets < 0) | (targets >= classes) | (preds < 0) | (preds >= classes)
        cells = torch.where(bad, 0, targets * classes + preds)
        counts.scatter_add_(0, cells.long(), (~bad).to(counts.dtype))
        return bad

    def class_names(self) -> list[str]:
        """Return the dataset's class names, or the class ids if there is not one name per class."""
        names = list((self.dataset_meta or {}).get("classes") or ())
        classes = self._classes
        return names if len(names) == classes else [str(index) for index in range(classes)]

    def _hits(self, preds: Tensor, targets: Tensor) -> Tensor:
        """Return a bool tensor `(N, max k)`; column i is True if the class with the i-th highest score is correct."""
        max_k = max(self.topk)
        if preds.ndim == 1:
            if max_k > 1 or preds.is_floating_point():
                raise DataError(
                    f"Accuracy got {describe(preds)} as preds; topk={self.topk} requires scores (N, classes)"
                    " or, if it is (1,), integer class ids (N,)"
                )
            return (preds == targets)[:, None]
        if preds.shape[1] < max_k:
            raise DataError(
                f"Accuracy: topk={self.topk} requires scores for at least {max_k} classes, got {preds.shape[1]}; set a "
                "smaller topk"
            )
        return preds.topk(max_k, dim=1).indices == targets[:, None]

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        """Return the accuracies in percent (NaN if there are no samples), and set `confusion`.

        Raises:
            DataError: if ids out of range were counted.
        """
        hits, (total, bad, *cells) = results[: len(self.topk)], results[len(self.topk) :]
        if bad:
            kind = "targets" if self.num_classes is None else "targets or predictions"
            raise DataError(
                f"{bad} of {total} {kind} are not valid class ids for the model (found by Accuracy); map the dataset's "
                "labels to 0..classes-1, or set the model's number of classes to that of the dataset"
            )
        self.confusion = None
        # Without `num_classes`, ids outside the dataset's classes are not errors, and the matrix would be incomplete.
        classes = round(len(cells) ** 0.5)
        if cells and (self.num_classes is not None or sum(cells) == total > 0):
            self.confusion = [cells[row : row + classes] for row in range(0, len(cells), classes)]
        return {
            f"top{k}": 100 * n / total if total else float("nan")
            for k, n in zip(self.topk, hits, strict=True)
        }
