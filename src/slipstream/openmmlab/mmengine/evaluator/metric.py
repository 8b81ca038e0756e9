"""Base classes for metrics."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.evaluator import BaseMetric
from slipstream.logging import print_log
from slipstream.openmmlab.mmengine.fileio import dump
from slipstream.openmmlab.mmengine.registry import METRICS
from slipstream.openmmlab.mmengine.structures import BaseDataElement

__all__ = ["BaseMetric", "DumpResults", "_to_cpu"]


@METRICS.register_module()
class DumpResults(BaseMetric):
    """Write the predictions of all samples to a pickle file and report no metric values.

    `mmengine.load` reads the file if the predictions are tensors, NumPy arrays and built-in values.

    Args:
        out_file_path: output file with the suffix `.pkl` or `.pickle`.
        collect_device, collect_dir: see `BaseMetric`.

    Raises:
        ConfigError: if `out_file_path` has a different suffix.
    """

    def __init__(
        self, out_file_path: str, collect_device: str = "cpu", collect_dir: str | None = None
    ) -> None:
        super().__init__(collect_device, collect_dir=collect_dir)
        if not str(out_file_path).endswith((".pkl", ".pickle")):
            raise ConfigError(f"must end with .pkl or .pickle, not {str(out_file_path)!r}", "out_file_path")
        self.out_file_path = out_file_path

    def process(self, data_batch: Any, predictions: Any) -> None:
        """Store the predictions of one batch on the CPU."""
        self.results.extend(_to_cpu(predictions))

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        """Write the file and return no metrics."""
        dump(results, self.out_file_path)
        print_log(f"Saved the results to {self.out_file_path}", "current")
        return {}


def _to_cpu(data: Any) -> Any:
    """Return `data` with every tensor and data element in its dicts, lists and tuples on the CPU."""
    if isinstance(data, Tensor | BaseDataElement):
        return data.to("cpu")
    if isinstance(data, dict):
        return {key: _to_cpu(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_to_cpu(value) for value in data]
    return tuple(_to_cpu(value) for value in data) if isinstance(data, tuple) else data
