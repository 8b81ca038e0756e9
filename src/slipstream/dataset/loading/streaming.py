"""Datasets from MosaicML's `streaming` package."""

from __future__ import annotations

import logging
import sys
from typing import Any

from slipstream.dataset.loading.samples import DatasetReader
from slipstream.extras import extra
from slipstream.logging import print_log
from slipstream.registry import DATASETS


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


class StreamingSamples(DatasetReader):
    """The samples of a MosaicML `StreamingDataset` as a map-style dataset.

    A `StreamingDataset` is iterable: it divides its samples among the processes and workers, and counts its epochs. Its
    samples can also be read by index. This class uses the order of the loader's sampler, so a run can resume after any
    batch, and augmentation depends only on the seed, the epoch and the indices of a batch.

    Args:
        dataset: a `StreamingDataset`. A subclass can override `__getitem__`, for example to apply transforms.
    """

    def __len__(self) -> int:
        return int(self.dataset.size)  # `len(dataset)` is the number of samples per process

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def as_map_style(dataset: Any) -> Any:
    """Return `StreamingSamples` for a MosaicML `StreamingDataset`, and other datasets unchanged.

    A `StreamingDataset` that repeats or selects samples is also returned unchanged, with a warning.
    """
    kind: Any = getattr(sys.modules.get("streaming"), "StreamingDataset", None)
    if not isinstance(kind, type) or not isinstance(dataset, kind):
        return dataset
    stream: Any = dataset
    selects = [part.choose for part in stream.streams] != stream.samples_per_stream.tolist()
    if stream.replication in (None, 1) and not selects:
        return StreamingSamples(dataset)
    print_log(
        f"{type(dataset).__name__} sets `replication`, `epoch_size`, or a stream's `proportion`, `repeat` or `choose`, "
        "so the samples are read in the dataset's own order, and a resumed run may repeat or omit samples; remove "
        "these options to make the order depend only on the run's seed and the epoch, or use a StreamingDataLoader, "
        "which saves its position",
        "current",
        logging.WARNING,
    )
    return dataset
