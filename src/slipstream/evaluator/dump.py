"""Write predictions to a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import ConfigError, DataError
from slipstream.evaluator.metric import BaseMetric, describe
from slipstream.files import atomic_write
from slipstream.plain_values import plain
from slipstream.registry import METRICS


@METRICS.register_module()
class DumpResults(BaseMetric):
    """Write the predictions to a file, with one entry per sample, and report no metric values.

    The file contains a list of predictions, made of tensors and built-in Python values, in the order of the dataset.
    Read the list with `torch.load(path, weights_only=True)`, and pass it to `Evaluator.offline_evaluate`. The metric
    splits a batch into samples if the batch is a tensor, or a dict or tuple whose values are tensors, arrays or lists
    with one entry per sample. A batch that is a list must contain one item per sample.

    Args:
        out_file_path: output file with the suffix `.pt` or `.pth`. A temporary file is written first, then renamed.
        kwargs: see `BaseMetric`.

    Raises:
        ConfigError: if `out_file_path` has a different suffix.
        DataError: if predictions contain objects other than tensors, arrays and built-in Python values.
    """

    def __init__(self, out_file_path: str | Path, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.out_file_path = Path(out_file_path)
        if self.out_file_path.suffix not in (".pt", ".pth"):
            raise ConfigError(f"must end with .pt or .pth, not {self.out_file_path.name!r}", "out_file_path")

    def process(self, data_batch: Any, data_samples: Any) -> None:
        """Store the predictions of one batch on the CPU."""
        self.results.extend(plain(sample, _refuse, "sample", _copy) for sample in _samples(data_samples))

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        """Write the file and return no metrics."""
        path = self.out_file_path
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            torch.save(results, temporary)
        return {}


def _refuse(message: str) -> None:
    raise DataError(f"DumpResults: {message}")


def _copy(where: str, tensor: Tensor) -> Tensor:
    # Saving or sending a view would include the storage of the whole batch.
    return tensor.to("cpu", copy=True)


def _samples(batch: Any) -> list[Any]:
    """Split a batch into samples."""
    if isinstance(batch, list):
        return batch
    if isinstance(batch, Tensor) and batch.ndim:
        return list(batch)
    columns = list(
        batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple) else ()
    )
    splittable = all(isinstance(p, list | np.ndarray) or (isinstance(p, Tensor) and p.ndim) for p in columns)
    if not columns or not splittable or len({len(c) for c in columns}) > 1:
        raise DataError(
            f"DumpResults cannot split {describe(batch)} into samples; in predict mode the model must return "
            "a list of samples, or a dict or tuple of tensors or lists with one entry per sample"
        )
    rows = list(zip(*columns, strict=True))
    return [dict(zip(batch, row, strict=True)) for row in rows] if isinstance(batch, Mapping) else rows
