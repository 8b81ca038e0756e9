"""Metrics that accumulate counts on the device, reduce them across ranks and copy them to the host once."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from slipstream.dist import all_reduce
from slipstream.evaluator.metric import BaseMetric
from slipstream.evaluator.samples import read_tensors

__all__ = ["CountingMetric"]


class CountingMetric(BaseMetric):
    """A metric computed from a vector of int64 counts.

    Counts are updated on the device of the predictions, without a device synchronization. At the end, `evaluate` sums
    the counts across ranks and copies them to the host once. Every processed sample is counted, so the sampler must
    not pad ranks with repeated samples (Slipstream's sampler does not do this during evaluation).

    Subclasses implement `num_counts`, `count` and `compute_metrics`, which receives the counts as a list.
    """

    _counts: Tensor | None = None
    confusion: list[list[int]] | None = None
    """The confusion matrix from the last evaluation (rows: targets, columns: predictions), if the metric has one."""
    uses_scores: ClassVar[bool] = False
    """For networks with one output channel, whether the metric uses the scores instead of the class ids."""

    @abstractmethod
    def num_counts(self) -> int:
        """Return the length of the count vector."""

    @abstractmethod
    def count(self, counts: Tensor, preds: Tensor, targets: Tensor) -> None:
        """Add one batch to `counts` in place, without synchronizing with the device.

        Raises:
            DataError: if the shapes do not match.
        """

    def process(self, data_batch: Any, data_samples: Any) -> None:
        """Count one batch; `data_samples` contains `preds` and `targets` in any form that `read_tensors` accepts.

        Raises:
            DataError: if `data_samples` is invalid (see `read_tensors`), or the shapes do not match.
        """
        preds, targets = read_tensors(data_samples, type(self).__name__)
        if self._counts is None:
            self._counts = self._zeros(preds.device)
        self.count(self._counts, preds, targets)

    def reset(self) -> None:
        """Discard the counts of an evaluation that ended with an error."""
        self._counts = None

    def evaluate(self, size: int) -> dict[str, Any]:
        """Return the metric's values over all ranks (the same on every rank), and reset the counts.

        Raises:
            DataError: if labels out of range were counted.
        """
        counts = self._zeros(torch.device("cpu")) if self._counts is None else self._counts
        self._counts = None
        return self.evaluate_counts(counts)

    def evaluate_counts(self, counts: Tensor) -> dict[str, Any]:
        """Sum the counts over all ranks in place, copy them to the host, and return the metric's values.

        Raises:
            DataError: if labels out of range were counted.
        """
        all_reduce(counts)
        return self._add_prefix(self.compute_metrics(counts.tolist()))

    def _zeros(self, device: torch.device) -> Tensor:
        # Tensors created in inference mode cannot be modified outside of it (for example by `all_reduce`).
        with torch.inference_mode(False):
            return torch.zeros(self.num_counts(), dtype=torch.int64, device=device)
