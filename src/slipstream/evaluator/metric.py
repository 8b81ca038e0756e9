"""Base class for metrics, compatible with MMEngine."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from slipstream.dist import broadcast_object_list, collect_results, is_main_process
from slipstream.errors import ConfigError, DistributedError

__all__ = ["BaseMetric"]


class BaseMetric(ABC):
    """Base class for metrics that collect one result per sample (or batch) and compute their values at the end.

    Subclasses implement `process`, which appends to `self.results`, and `compute_metrics`.

    Args:
        collect_device: `cpu` or `gpu`; has no effect, and is accepted for compatibility with MMEngine.
        prefix: prefix of the metric names, as in `prefix/name`. Default: the `default_prefix` class attribute,
            which may be None.
        collect_dir: also has no effect; allowed only with `collect_device='cpu'`.

    Raises:
        ConfigError: if `collect_device` is unknown, or `collect_dir` is set without `collect_device='cpu'`.
    """

    default_prefix: str | None = None

    def __init__(
        self, collect_device: str = "cpu", prefix: str | None = None, collect_dir: str | None = None
    ) -> None:
        if collect_device not in ("cpu", "gpu"):
            raise ConfigError(f"must be 'cpu' or 'gpu', not {collect_device!r}", "collect_device")
        if collect_dir is not None and collect_device != "cpu":
            raise ConfigError(
                "requires collect_device='cpu'; remove collect_dir or collect_device",
                "collect_dir",
            )
        self.collect_device = collect_device
        self.collect_dir = collect_dir
        self.prefix = prefix or self.default_prefix
        self.results: list[Any] = []
        self._dataset_meta: Mapping[str, Any] | None = None

    @property
    def dataset_meta(self) -> Mapping[str, Any] | None:
        """The dataset's `metainfo` (`classes`, `palette`, `ignore_index`), or None before it is set."""
        return self._dataset_meta

    @dataset_meta.setter
    def dataset_meta(self, dataset_meta: Mapping[str, Any]) -> None:
        self._dataset_meta = dataset_meta

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
        failure: Exception | None = None
        if is_main_process():
            try:
                outcome = [self._compute(results or [])]
            except Exception as error:  # the other ranks wait for the broadcast
                failure, outcome = error, [f"{type(error).__name__}: {error}"]
        broadcast_object_list(outcome)
        if failure is not None:
            raise failure
        if isinstance(outcome[0], str):
            raise DistributedError(
                f"{type(self).__name__}.compute_metrics failed on rank 0: {outcome[0]}; see the traceback of rank 0"
            )
        metrics: dict[str, Any] = outcome[0]
        return metrics

    def _compute(self, results: list[Any]) -> dict[str, Any]:
        if not results:
            warnings.warn(
                f"{type(self).__name__} has no results because process() was never called "
                "or did not append to self.results",
                stacklevel=3,
            )
        return self._add_prefix(self.compute_metrics(results))

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
