"""MMEngine's collate functions and worker initialization function."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate as torch_default_collate

from slipstream.errors import DataError
from slipstream.openmmlab.mmengine.registry import FUNCTIONS
from slipstream.openmmlab.mmengine.structures import BaseDataElement

__all__ = ["default_collate", "pseudo_collate", "worker_init_fn"]


@FUNCTIONS.register_module()
def pseudo_collate(data_batch: Sequence[Any]) -> Any:
    """Collate samples without stacking: each leaf of the batch is a list with one value per sample."""
    return _collate(data_batch, _identity)


@FUNCTIONS.register_module()
def default_collate(data_batch: Sequence[Any]) -> Any:
    """Collate samples into a batch with the same structure. Tensors are stacked; data elements are not."""
    return _collate(data_batch, lambda values: torch_default_collate(list(values)))


def _collate(batch: Sequence[Any], leaf: Callable[[Sequence[Any]], Any]) -> Any:
    first = batch[0]
    if isinstance(first, BaseDataElement | str | bytes):
        return batch
    if isinstance(first, Mapping):
        return type(first)({key: _collate([sample[key] for sample in batch], leaf) for key in first})  # type: ignore[call-arg]
    if not isinstance(first, Sequence):
        return leaf(batch)
    if len({len(sample) for sample in batch}) > 1:
        raise DataError(
            f"cannot collate samples of different lengths: {[len(sample) for sample in batch]}; "
            "return the same number of values for every sample"
        )
    columns = [_collate(column, leaf) for column in zip(*batch, strict=True)]
    if hasattr(first, "_fields"):
        return type(first)(*columns)
    return columns if isinstance(first, tuple) else _rebuild_sequence(first, columns)


def _identity(values: Sequence[Any]) -> Any:
    return values


def _rebuild_sequence(first: Sequence[Any], columns: list[Any]) -> Any:
    try:
        return type(first)(columns)  # type: ignore[call-arg]
    except TypeError:  # this sequence type cannot be constructed from a list
        return columns


def worker_init_fn(
    worker_id: int, num_workers: int, rank: int, seed: int, disable_subprocess_warning: bool = False
) -> None:
    """Seed the random number generators of a worker process with `num_workers * rank + worker_id + seed`.

    The Runner does not use this function. It derives the seed of each sample from the run's seed, the epoch and the
    sample index.
    """
    worker_seed = num_workers * rank + worker_id + seed
    np.random.seed(worker_seed)
    random.seed(worker_seed)
    torch.manual_seed(worker_seed)
