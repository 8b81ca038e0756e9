"""Datasets from MosaicML's `streaming` package."""

from __future__ import annotations

from typing import Any

from slipstream.extras import extra
from slipstream.registry import DATASETS

__all__ = ["streaming_dataset"]


@DATASETS.register_module("StreamingDataset")
def streaming_dataset(**options: Any) -> Any:
    """Return a MosaicML `StreamingDataset`, whose samples the data loader reads by index (see `StreamingSamples`).

    Args:
        options: keyword arguments for `streaming.StreamingDataset`, such as `local`, `remote` and `split`.

    Raises:
        MissingPackageError: the package is not installed.
    """
    with extra("mosaicml"):
        from streaming import StreamingDataset
    return StreamingDataset(**options)
