"""Read the samples of MosaicML's `StreamingDataset` by index."""

from __future__ import annotations

import logging
import sys
from typing import Any

from torch.utils.data import Dataset

from slipstream.logging import print_log

__all__ = ["StreamingSamples", "as_map_style"]


class StreamingSamples(Dataset[Any]):
    """The samples of a MosaicML `StreamingDataset` as a map-style dataset.

    A `StreamingDataset` is iterable: it divides its samples among the processes and workers, and counts its epochs. Its
    samples can also be read by index. This class uses the order of the loader's sampler, so a run can resume after any
    batch, and augmentation depends only on (seed, epoch, index). All other attributes are read from `stream`.

    Args:
        stream: a `StreamingDataset`. A subclass can override `__getitem__`, for example to apply transforms.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __len__(self) -> int:
        return int(self.stream.size)  # `len(stream)` is the number of samples per process

    def __getitem__(self, index: int) -> Any:
        return self.stream[index]

    def __getattr__(self, name: str) -> Any:
        if name == "stream":  # unpickling accesses `stream` before it is set
            raise AttributeError(name)
        return getattr(self.stream, name)


def as_map_style(dataset: Any) -> Any:
    """Return `StreamingSamples` for a MosaicML `StreamingDataset`, and other datasets unchanged.

    A `StreamingDataset` with unsupported options is also returned unchanged, with a warning.
    """
    kind = getattr(sys.modules.get("streaming"), "StreamingDataset", None)
    if not isinstance(kind, type) or not isinstance(dataset, kind):
        return dataset
    if option := _unsupported(dataset):
        print_log(
            f"{type(dataset).__name__} sets {option}, so the samples are read in the dataset's own order, and a "
            "resumed run may repeat or omit samples; remove this option to make the order depend only on the run's "
            "seed and the epoch",
            "current",
            logging.WARNING,
        )
        return dataset
    return StreamingSamples(dataset)


def _unsupported(stream: Any) -> str:
    """Return the options that would be ignored if samples were read by index, or an empty string if there are none."""
    if stream.replication not in (None, 1):
        return "`replication`"
    chosen = [part.choose for part in stream.streams]
    if chosen != stream.samples_per_stream.tolist():
        return "`epoch_size`, or a stream's `proportion`, `repeat` or `choose`"
    return ""
