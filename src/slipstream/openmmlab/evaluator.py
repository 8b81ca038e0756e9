"""MMEngine's metrics."""

from __future__ import annotations

from typing import Any

from mmengine.fileio import dump
from mmengine.structures import BaseDataElement
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.evaluator import BaseMetric
from slipstream.logging import print_log
from slipstream.openmmlab.registry import METRICS

__all__ = ["BaseMetric", "DumpResults", "_to_cpu"]


@METRICS.register_module()
class DumpResults(BaseMetric):
    """Save the predictions of all samples to a pickle file, without computing any metrics.

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
        """Move the predictions of one batch to the CPU and store them."""
        self.results.extend(_to_cpu(predictions))

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        """Write the file, and return an empty dict."""
        dump(results, self.out_file_path)
        print_log(f"Saved the results to {self.out_file_path}", "current")
        return {}


def _to_cpu(data: Any) -> Any:
    """Move all tensors and data elements in nested dicts, lists and tuples to the CPU, and return the result."""
    if isinstance(data, Tensor | BaseDataElement):
        return data.to("cpu")
    if isinstance(data, dict):
        return {key: _to_cpu(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_to_cpu(value) for value in data]
    return tuple(_to_cpu(value) for value in data) if isinstance(data, tuple) else data
