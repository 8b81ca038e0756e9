"""Classification accuracy, counted on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ConfigError, DataError
from slipstream.evaluator.counting import CountingMetric
from slipstream.evaluator.samples import describe
from slipstream.registry import METRICS

__all__ = ["Accuracy"]


@METRICS.register_module()
class Accuracy(CountingMetric):
    """Top-k accuracy in percent, reported as `accuracy/top1` and so on.

    The predictions are scores `(N, classes)`, or class ids `(N,)` if `topk` is `(1,)`. The targets are class ids
    `(N,)`.

    Args:
        topk: the values of k.
        collect_device, prefix, collect_dir: see `BaseMetric`.

    Raises:
        ConfigError: `topk` is empty or contains a value below 1.
        DataError: the shapes do not match, there are fewer classes than k, or (in `evaluate`) class ids are out of
            range.
    """

    default_prefix: str | None = "accuracy"

    def __init__(
        self,
        topk: int | tuple[int, ...] = (1,),
        collect_device: str = "cpu",
        prefix: str | None = None,
        collect_dir: str | None = None,
    ) -> None:
        super().__init__(collect_device, prefix, collect_dir)
        self.topk = (topk,) if isinstance(topk, int) else tuple(topk)
        if not self.topk or min(self.topk) < 1:
            raise ConfigError(f"must be one or more integers of at least 1, got {topk!r}", "topk")

    def num_counts(self) -> int:
        """Return the number of counts: one for each k, plus samples and targets out of range."""
        return len(self.topk) + 2

    def count(self, counts: Tensor, preds: Tensor, targets: Tensor) -> None:
        """Add the samples of one batch."""
        if targets.ndim != 1 or preds.shape[:1] != targets.shape or preds.ndim > 2:
            raise DataError(
                f"Accuracy got {describe(preds)} as preds and {describe(targets)} as targets; "
                "it requires scores (N, classes) or class ids (N,), and targets (N,)"
            )
        hits = self._hits(preds, targets)
        bad = targets < 0
        if preds.ndim == 2:
            bad = bad | (targets >= preds.shape[1])
        counts[:-2].add_(torch.stack([hits[:, :k].sum() for k in self.topk]))
        counts[-2].add_(len(targets))
        counts[-1].add_(bad.sum())

    def _hits(self, preds: Tensor, targets: Tensor) -> Tensor:
        """Return a bool tensor `(N, max k)`, True where the class at that rank is the target."""
        widest = max(self.topk)
        if preds.ndim == 1:
            if widest > 1 or preds.is_floating_point():
                raise DataError(
                    f"Accuracy got {describe(preds)} as preds; topk={self.topk} requires scores (N, classes)"
                )
            return (preds == targets)[:, None]
        if preds.shape[1] < widest:
            raise DataError(f"top-{widest} accuracy requires at least {widest} classes, got {preds.shape[1]}")
        return preds.topk(widest, dim=1).indices == targets[:, None]

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        """Return the accuracies in percent from the counts; NaN if there are no samples.

        Raises:
            DataError: targets out of range were counted.
        """
        *right, total, bad = results
        if bad:
            raise DataError(
                f"{bad} of {total} targets are not classes of the model (found by Accuracy); map the dataset's labels "
                "to 0..classes-1, or set the model's number of classes to that of the dataset"
            )
        return {
            f"top{k}": 100 * n / total if total else float("nan")
            for k, n in zip(self.topk, right, strict=True)
        }
