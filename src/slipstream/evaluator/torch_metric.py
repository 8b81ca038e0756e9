"""Adapter for torchmetrics."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from slipstream.dist import get_comm_device
from slipstream.errors import ConfigError
from slipstream.evaluator.metric import BaseMetric, read_pair
from slipstream.registry import METRICS

__all__ = ["TorchMetric", "is_torchmetrics", "is_torchmetrics_class"]


@METRICS.register_module()
class TorchMetric(BaseMetric):
    """Wrap a torchmetrics `Metric` or `MetricCollection`.

    Each batch is passed to `metric.update(preds, targets)`. The value is computed once at the end, and the metric is
    then reset. The metric is moved to the device of the first batch. The value is reported under the metric's class
    name, such as `MulticlassAccuracy`. Values in a dict are reported as `<name>/<key>`, and those in a vector as
    `<name>/0`, `<name>/1` and so on. The values of a collection keep their names.

    torchmetrics reduces the metric's state across ranks. Every processed sample is counted, so the sampler must not pad
    ranks with repeated samples (Slipstream's sampler does not do this during evaluation). Many torchmetrics classes
    validate each batch on the host, which synchronizes with the device; `validate_args=False` prevents this.

    Args:
        metric: a torchmetrics object, or a dict whose `type` is a torchmetrics class.
        name: name of the value (default: the class name) or, for a collection, a prefix for the names (default: none).
        prefix: prefix of the name, as in `prefix/name`.

    Raises:
        ConfigError: if `metric` is not a torchmetrics object.
    """

    def __init__(self, metric: Any, name: str | None = None, prefix: str | None = None) -> None:
        super().__init__(prefix=prefix)
        self.metric = METRICS.build(metric) if isinstance(metric, Mapping) else metric
        if not is_torchmetrics(self.metric):
            raise ConfigError(
                f"must be a torchmetrics Metric or MetricCollection, got {type(self.metric).__name__}",
                "metric",
            )
        is_collection = isinstance(self.metric, nn.ModuleDict)
        self.name = name or ("" if is_collection else type(self.metric).__name__)
        self._on_device = False

    def process(self, data_batch: Any, data_samples: Any) -> None:
        """Update the metric with `preds` and `targets` from `data_samples`, in any form that `read_pair` accepts.

        Raises:
            DataError: if `data_samples` has a different structure.
        """
        preds, targets = read_pair(data_samples, self.name or "MetricCollection")
        if not self._on_device:
            tensors = (leaf for leaf in tree_leaves((preds, targets)) if isinstance(leaf, Tensor))
            self._move_to(next((tensor.device for tensor in tensors), get_comm_device()))
        self.metric.update(preds, targets)

    def reset(self) -> None:
        """Discard the state of an evaluation that ended with an error."""
        self.metric.reset()

    def evaluate(self, size: int) -> dict[str, Any]:
        """Return the value over all ranks as built-in Python numbers, and reset the metric."""
        if not self._on_device:  # a rank without batches must still participate in the collective
            self._move_to(get_comm_device())
        value = self.metric.compute()
        self.metric.reset()
        self._on_device = False
        return self._add_prefix(dict(_flatten(self.name, value)))

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        """Not used; torchmetrics stores the state."""
        raise NotImplementedError

    def _move_to(self, device: torch.device) -> None:
        with torch.inference_mode(
            False
        ):  # tensors created in inference mode cannot be modified outside of it
            self.metric.to(device)
        self._on_device = True


def is_torchmetrics(value: Any) -> bool:
    """Return whether `value` is a torchmetrics `Metric` or `MetricCollection`, without importing the library."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric | torchmetrics.MetricCollection)


def is_torchmetrics_class(value: Any) -> bool:
    """Return whether `value` is a subclass of the torchmetrics `Metric` class, without importing the library."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, type) and issubclass(value, torchmetrics.Metric)


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = dict(enumerate(value)).items()
    else:
        yield name, value
        return
    for key, item in items:
        yield from _flatten(f"{name}/{key}" if name else str(key), item)
