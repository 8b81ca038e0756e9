"""Metrics that are sums of counts: kept on the device, added over the ranks, read once."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from slipstream.dist import all_reduce
from slipstream.evaluator.metric import BaseMetric
from slipstream.evaluator.samples import read_tensors

__all__ = ["CountingMetric"]


class CountingMetric(BaseMetric):
    """A metric computed from a vector of int64 counts.

    `process` only adds to the counts on the device of the predictions and never waits for it; the counts
    are added over the ranks and read once, in `evaluate`. Every sample that is processed counts, so a
    sampler must not repeat samples to even out the ranks (Slipstream's does not in evaluation).

    Subclasses write `num_counts`, `count` and `compute_metrics`, which receives the counts as a list.
    """

    _counts: Tensor | None = None

    @abstractmethod
    def num_counts(self) -> int:
        """Return the length of the vector of counts."""

    @abstractmethod
    def count(self, counts: Tensor, preds: Tensor, targets: Tensor) -> None:
        """Add one batch to `counts` in place, without waiting for the device.

        Raises:
            DataError: shapes that do not belong together.
        """

    def process(self, data_batch: Any, data_samples: Any) -> None:
        """Count one batch; `data_samples` holds tensors `preds` and `targets`, in a dict or as a pair.

        Raises:
            DataError: `data_samples` has another form.
        """
        preds, targets = read_tensors(data_samples, type(self).__name__)
        if self._counts is None:
            self._counts = self._zeros(preds.device)
        self.count(self._counts, preds, targets)

    def evaluate(self, size: int) -> dict[str, Any]:
        """Return the metric's values over all ranks, the same on each, and set the counts to zero.

        Raises:
            DataError: labels out of range were counted.
        """
        counts = self._zeros(torch.device("cpu")) if self._counts is None else self._counts
        self._counts = None
        return self.read(counts)

    def read(self, counts: Tensor) -> dict[str, Any]:
        """Return the metric's values from every rank's counts, which are summed in place; waits for the device.

        Raises:
            DataError: labels out of range were counted.
        """
        all_reduce(counts)
        return self._named(self.compute_metrics(counts.tolist()))

    def _zeros(self, device: torch.device) -> Tensor:
        # A tensor made in inference mode could not be changed outside of it, by the reduction say.
        with torch.inference_mode(False):
            return torch.zeros(self.num_counts(), dtype=torch.int64, device=device)
