"""Evaluator for one or more metrics, compatible with MMEngine, and an adapter for torchmetrics."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from slipstream.dist import get_comm_device
from slipstream.errors import ConfigError, DataError
from slipstream.evaluator.metric import BaseMetric, LossMetric, read_pair
from slipstream.registry import EVALUATOR, METRICS


@EVALUATOR.register_module()
class Evaluator:
    """Pass each batch to the metrics and merge their values.

    Args:
        metrics: one or more metrics, each a `BaseMetric`, a torchmetrics object, a dict whose `type`
            is a registered metric or a torchmetrics class (`dict(type="MulticlassAccuracy",
            num_classes=10)`), or `'loss'` for the mean of each loss.

    Raises:
        ConfigError: if an entry has a different type.
    """

    def __init__(self, metrics: Any) -> None:
        several = isinstance(metrics, Sequence) and not isinstance(metrics, str)
        self.metrics: list[BaseMetric] = [_metric(entry) for entry in (metrics if several else [metrics])]
        self._dataset_meta: Mapping[str, Any] | None = None

    @property
    def dataset_meta(self) -> Mapping[str, Any] | None:
        """The dataset's `metainfo`, or None before it is set. Setting this property also sets it for every metric."""
        return self._dataset_meta

    @dataset_meta.setter
    def dataset_meta(self, dataset_meta: Mapping[str, Any]) -> None:
        self._dataset_meta = dataset_meta
        for metric in self.metrics:
            metric.dataset_meta = dataset_meta

    def reset(self) -> None:
        """Discard the results of an evaluation that ended with an error."""
        for metric in self.metrics:
            metric.reset()

    @property
    def loss_metrics(self) -> list[BaseMetric]:
        """The metrics that average the losses of the batches."""
        return [metric for metric in self.metrics if type(metric) is LossMetric]

    def process(self, data_samples: Any, data_batch: Any = None, losses: Any = None) -> None:
        """Pass a batch, and the model's output for this batch in predict mode, to every metric.

        As in MMEngine, `BaseDataElement` objects are converted to dicts. `losses` are the data samples for
        `loss_metrics`, a pair of a dict of losses and the number of samples.
        """
        if isinstance(data_samples, list | tuple) and any(map(_is_data_element, data_samples)):
            data_samples = [s.to_dict() if _is_data_element(s) else s for s in data_samples]
        for metric in self.metrics:
            metric.process(data_batch, losses if type(metric) is LossMetric else data_samples)

    def evaluate(self, size: int) -> dict[str, float]:
        """Return a dict with the values of all metrics over all ranks, and reset the metrics.

        Args:
            size: number of samples in the dataset.

        Raises:
            ConfigError: if two metrics report the same name.
        """
        values: dict[str, float] = {}
        for metric in self.metrics:
            own = metric.evaluate(size)
            if common := sorted(values.keys() & own.keys()):
                raise ConfigError(
                    f"two metrics report '{common[0]}' (one of them is {type(metric).__name__}); set a different "
                    "prefix=... for at least one of them"
                )
            values |= own
        return values

    def offline_evaluate(
        self, data_samples: Sequence[Any], data: Sequence[Any] | None = None, chunk_size: int = 1
    ) -> dict[str, float]:
        """Return the metrics for stored predictions in the `DumpResults` format.

        Args:
            data_samples: one prediction per sample.
            data: the samples of the dataset, in the same order, for metrics that use them.
            chunk_size: number of samples in each call to `process`.

        Raises:
            DataError: if `data` and `data_samples` differ in length.
        """
        if data is not None and len(data) != len(data_samples):
            raise DataError(
                f"data_samples has length {len(data_samples)}, but data has length {len(data)}; "
                "pass one prediction per sample"
            )
        for start in range(0, len(data_samples), chunk_size):
            chunk = slice(start, start + chunk_size)
            self.process(list(data_samples[chunk]), None if data is None else list(data[chunk]))
        return self.evaluate(len(data_samples))


def _metric(entry: Any) -> BaseMetric:
    options: dict[str, Any] = {}
    metric = LossMetric() if isinstance(entry, str) and entry == "loss" else entry
    if isinstance(entry, Mapping):
        kind = entry.get("type")
        target = METRICS.get(kind) if isinstance(kind, str) else kind
        if str(getattr(target, "__module__", "")).startswith("torchmetrics."):  # options of TorchMetric
            options = {key: entry[key] for key in ("name", "prefix") if key in entry}
        # Build from the original dict if possible, because its identity is used to locate an error in the user config.
        metric = METRICS.build({k: v for k, v in entry.items() if k not in options} if options else entry)
    if is_torchmetrics(metric):
        return TorchMetric(metric, **options)
    if not isinstance(metric, BaseMetric):
        raise ConfigError(
            "a metric must be a BaseMetric, a torchmetrics object, a dict with a 'type', or 'loss', not "
            f"{metric!r}",
            "metrics",
        )
    return metric


def _is_data_element(sample: Any) -> bool:
    """Return whether the sample is a `BaseDataElement`.

    The class is recognized by its name, so that its module need not be imported.
    """
    return any(base.__name__ == "BaseDataElement" for base in type(sample).__mro__)


@METRICS.register_module()
class TorchMetric(BaseMetric):
    """Wrap a torchmetrics `Metric` or `MetricCollection`.

    Each batch is passed to `metric.update(preds, targets)`. The value is computed once at the end, and the metric is
    then reset. The metric is moved to the device of the first batch. The value is reported under the metric's class
    name, such as `MulticlassAccuracy`. Values in a dict are reported as `<name>/<key>`, and those in a vector as
    `<name>/0`, `<name>/1` and so on. The values of a collection keep their names.

    torchmetrics reduces the metric's state across ranks. Many torchmetrics classes
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

    def higher_is_better(self, key: str) -> bool | None:
        """Return what torchmetrics declares for the value reported as `key`; None if that is unknown."""
        is_collection = isinstance(self.metric, nn.ModuleDict)
        for name, metric in self.metric.items() if is_collection else [("", self.metric)]:
            reported = "/".join(filter(None, (self.prefix, self.name, name)))
            if f"{key}/".startswith(f"{reported}/"):
                return getattr(metric, "higher_is_better", None)
        return None

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
