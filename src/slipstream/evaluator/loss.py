"""A metric that reports the mean losses of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from slipstream.evaluator.metric import BaseMetric

__all__ = ["LossMetric"]


class LossMetric(BaseMetric):
    """The mean of each loss over the samples. The loss of a batch is assumed to be the mean over its samples."""

    def process(self, data_batch: Any, data_samples: tuple[Mapping[str, Tensor], int]) -> None:
        """Store the losses of one batch; `data_samples` contains a dict of losses and the number of samples."""
        losses, samples = data_samples
        self.results.append(({name: loss.detach() for name, loss in losses.items()}, samples))

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        """Return the mean of each loss by name."""
        names = dict.fromkeys(name for losses, _ in results for name in losses)
        weighted = {
            name: [(losses[name].double(), n) for losses, n in results if name in losses] for name in names
        }
        return {
            name: float(sum(loss * n for loss, n in values) / sum(n for _, n in values))
            for name, values in weighted.items()
        }
