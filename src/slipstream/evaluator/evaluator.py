"""Evaluator for one or more metrics, compatible with MMEngine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.errors import ConfigError, DataError
from slipstream.evaluator.metric import BaseMetric
from slipstream.evaluator.torch_metric import TorchMetric, is_torchmetrics
from slipstream.registry import EVALUATOR, METRICS

__all__ = ["Evaluator"]


@EVALUATOR.register_module()
class Evaluator:
    """Pass each batch to the metrics and merge their values.

    Args:
        metrics: one or more metrics, each a `BaseMetric`, a torchmetrics object, or a dict whose `type`
            is a registered metric or a torchmetrics class (`dict(type="MulticlassAccuracy",
            num_classes=10)`).

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

    def process(self, data_samples: Any, data_batch: Any = None) -> None:
        """Pass a batch, and the model's output for this batch in predict mode, to every metric.

        As in MMEngine, `BaseDataElement` objects are converted to dicts.
        """
        if isinstance(data_samples, list | tuple) and any(map(_is_data_element, data_samples)):
            data_samples = [s.to_dict() if _is_data_element(s) else s for s in data_samples]
        for metric in self.metrics:
            metric.process(data_batch, data_samples)

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
    metric = entry
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
            f"a metric must be a BaseMetric, a torchmetrics object or a dict with a 'type', got {metric!r}; to "
            "evaluate only the loss, set val_evaluator='loss'",
            "metrics",
        )
    return metric


def _is_data_element(sample: Any) -> bool:
    """Return whether the sample is a `BaseDataElement`.

    The class is recognized by its name, so that its module need not be imported.
    """
    return any(base.__name__ == "BaseDataElement" for base in type(sample).__mro__)
