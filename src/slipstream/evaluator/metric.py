"""Base classes of metrics, compatible with MMEngine, and what they read from the outputs of models."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from slipstream.dist import all_reduce, broadcast_object_list, collect_results, is_main_process
from slipstream.errors import DataError, DistributedError


class BaseMetric(ABC):
    """Base class for metrics that collect one result per sample (or batch) and compute their values at the end.

    Subclasses implement `process`, which appends to `self.results`, and `compute_metrics`.

    Args:
        collect_device: `cpu` or `gpu`; has no effect, and is accepted for compatibility with MMEngine.
        prefix: prefix of the metric names, as in `prefix/name`. Default: the `default_prefix` class attribute,
            which may be None.
        collect_dir: also has no effect.
    """

    default_prefix: str | None = None

    def __init__(
        self, collect_device: str = "cpu", prefix: str | None = None, collect_dir: str | None = None
    ) -> None:
        self.collect_device = collect_device
        self.collect_dir = collect_dir
        self.prefix = prefix or self.default_prefix
        self.results: list[Any] = []
        # The dataset's `metainfo` (`classes`, `palette`, `ignore_index`), or None before it is set.
        self.dataset_meta: Mapping[str, Any] | None = None

    @abstractmethod
    def process(self, data_batch: Any, data_samples: Any) -> None:
        """Process one batch.

        Args:
            data_batch: the batch from the data loader.
            data_samples: the model's output for this batch in predict mode.
        """

    @abstractmethod
    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        """Return the metric values by name; `results` contains the results of all ranks, in sample order."""

    def reset(self) -> None:
        """Discard the results of an evaluation that ended with an error."""
        self.results.clear()

    def evaluate(self, size: int) -> dict[str, Any]:
        """Return the metric's values over all ranks (the same on every rank), and clear the results.

        Args:
            size: number of samples in the dataset. Results beyond this number are dropped; they come from samples
                that the sampler repeated to pad the ranks.

        Raises:
            DistributedError: if `compute_metrics` failed on rank 0 (rank 0 raises the original error).
        """
        results = collect_results(_to_cpu(self.results), size, self.collect_device, self.collect_dir)
        self.results.clear()
        outcome: list[Any] = [None]
        if is_main_process():
            if not results:
                warnings.warn(f"{type(self).__name__} has no results: nothing was processed", stacklevel=3)
            try:
                outcome = [self._add_prefix(self.compute_metrics(results or []))]
            except Exception as error:
                # The other ranks wait for the broadcast.
                broadcast_object_list([f"{type(error).__name__}: {error}"])
                raise
        broadcast_object_list(outcome)
        if isinstance(outcome[0], str):
            raise DistributedError(
                f"{type(self).__name__}.compute_metrics failed on rank 0: {outcome[0]}; see the traceback of rank 0"
            )
        return outcome[0]

    def _add_prefix(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Add the prefix to the names and convert scalars to built-in Python numbers."""
        prefix = f"{self.prefix}/" if self.prefix else ""
        return {prefix + name: _plain(value) for name, value in metrics.items()}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor | np.generic | np.ndarray) and value.ndim == 0 else value


def _to_cpu(value: Any) -> Any:
    """Return `value` with every tensor in its dicts, lists and tuples detached and moved to the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _to_cpu(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_to_cpu(item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_to_cpu(item) for item in value)
    return value


class CountingMetric(BaseMetric):
    """A metric computed from a vector of int64 counts.

    Counts are updated on the device of the predictions, without a device synchronization. At the end, `evaluate` sums
    the counts across ranks and copies them to the host once.

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


class LossMetric(BaseMetric):
    """The mean of each loss over the samples. The loss of a batch is assumed to be the mean over its samples.

    The name `'loss'` in a Runner's evaluator stands for this metric. The loop computes the losses.
    """

    def process(self, data_batch: Any, data_samples: tuple[Mapping[str, Tensor], int]) -> None:
        """Store the losses of one batch; `data_samples` contains a dict of losses and the number of samples."""
        losses, samples = data_samples
        self.results.append(({name: loss.detach() for name, loss in losses.items()}, samples))

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        """Return the mean of each loss by name."""
        weighted: dict[str, Any] = {}
        counts: dict[str, int] = {}
        for losses, samples in results:
            for name, loss in losses.items():
                weighted[name] = weighted.get(name, 0.0) + loss.double() * samples
                counts[name] = counts.get(name, 0) + samples
        return {name: float(total / counts[name]) for name, total in weighted.items()}


def read_pair(data_samples: Any, metric_name: str) -> tuple[Any, Any]:
    """Return `(preds, targets)` for a batch.

    Args:
        data_samples: a dict with `preds` and `targets`, a tuple `(preds, targets)`, or a list with one such
            dict or tuple per sample. The tensors in a list are stacked.
        metric_name: name of the metric in error messages.

    Raises:
        DataError: if `data_samples` has a different structure.
    """
    if isinstance(data_samples, list) and data_samples and all(_is_sample(s) for s in data_samples):
        preds, targets = zip(*(_split(sample) for sample in data_samples), strict=True)
        return _stack(preds, metric_name), _stack(targets, metric_name)
    if _is_sample(data_samples):
        return _split(data_samples)
    raise DataError(
        f"{metric_name} got {describe(data_samples)}; in predict mode the model must return a dict with "
        "'preds' and 'targets', or a tuple (preds, targets)"
    )


def read_tensors(data_samples: Any, metric_name: str) -> tuple[Tensor, Tensor]:
    """Return `(preds, targets)` like `read_pair`, as detached tensors.

    Raises:
        DataError: if `read_pair` does not accept `data_samples`, if the predictions and targets are not tensors, or if
            the targets are not integers.
    """
    preds, targets = read_pair(data_samples, metric_name)
    for name, value in (("preds", preds), ("targets", targets)):
        if not isinstance(value, Tensor):
            raise DataError(f"{metric_name} requires {name} to be a tensor, not {describe(value)}")
    if targets.is_floating_point() or targets.is_complex():
        raise DataError(
            f"{metric_name} requires integer class ids as targets, got {targets.dtype}; convert them with .long()"
        )
    return preds.detach(), targets.detach()


def describe(value: Any) -> str:
    """Return a description of `value` for an error message."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict with the keys {sorted(map(str, value))}"
    if isinstance(value, list | tuple):
        kinds = sorted({type(item).__name__ for item in value})
        return f"a {type(value).__name__} of length {len(value)} ({', '.join(kinds)})"
    return f"an object of type {type(value).__name__}"


def _is_sample(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "preds" in value and "targets" in value
    return isinstance(value, tuple) and len(value) == 2


def _split(sample: Any) -> tuple[Any, Any]:
    if isinstance(sample, Mapping):
        return sample["preds"], sample["targets"]
    preds, targets = sample
    return preds, targets


def _stack(values: tuple[Any, ...], metric_name: str) -> Any:
    if all(isinstance(value, int | float) for value in values):
        return torch.tensor(values)
    if not all(isinstance(value, Tensor) for value in values):
        return list(values)  # for metrics that accept lists, for example lists of boxes
    if len({value.shape for value in values}) > 1:
        raise DataError(
            f"{metric_name} got samples of different sizes in one batch; set the batch size (or the chunk size) to 1"
        )
    return torch.stack(values)
