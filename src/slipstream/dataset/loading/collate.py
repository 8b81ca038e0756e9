"""Collate functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import default_collate as torch_default_collate

from slipstream.errors import DataError
from slipstream.registry import FUNCTIONS

__all__ = ["default_collate", "pseudo_collate", "torch_default_collate"]


FUNCTIONS.register_module(name="torch_default_collate", module=torch_default_collate)

_UNEQUAL_TENSORS = ("stack expects each tensor", "storage that is not resizable")
"""Parts of torch's messages; in a worker process, the second one appears if the first tensor is the largest."""


@FUNCTIONS.register_module()
def default_collate(data_batch: Sequence[Any]) -> Any:
    """Stack samples as torch's `default_collate` does.

    Raises:
        DataError: tensors of different sizes, or lists of different lengths, cannot be stacked.
    """
    try:
        return torch_default_collate(list(data_batch))
    except RuntimeError as error:
        if any(part in str(error) for part in _UNEQUAL_TENSORS):
            remedy = "add a transform that resizes, crops or pads them to one size, or use a batch size of 1"
        elif "list of batch should be of equal size" in str(error):
            remedy = "return the same number of values for each sample, or set collate_fn='pseudo_collate'"
        else:
            raise
        raise DataError(f"the samples of a batch cannot be stacked ({error}); {remedy}") from error


@FUNCTIONS.register_module()
def pseudo_collate(data_batch: Sequence[Any]) -> Any:
    """Return a batch with the structure of a sample, in which each leaf is a list with one value per sample.

    Values are not stacked or converted, so they may differ in shape. Mappings, lists and named tuples keep
    their type; tuples become lists, as in torch's `default_collate`.

    Raises:
        DataError: the samples contain sequences of different lengths.
    """
    first = data_batch[0]
    if isinstance(first, Mapping):
        return type(first)({key: pseudo_collate([d[key] for d in data_batch]) for key in first})  # type: ignore[call-arg]
    if isinstance(first, str | bytes) or not isinstance(first, Sequence):
        return list(data_batch)
    if len({len(sample) for sample in data_batch}) > 1:
        raise DataError(
            f"cannot collate samples of different lengths: {[len(s) for s in data_batch]}; "
            "return the same number of items for every sample"
        )
    columns = [pseudo_collate(column) for column in zip(*data_batch, strict=True)]
    return type(first)(*columns) if hasattr(first, "_fields") else columns
