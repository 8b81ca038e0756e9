"""`InstanceData`: data fields of equal length that can be indexed together."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch

from slipstream.openmmlab.mmengine.structures.base_data_element import _PRIVATE, BaseDataElement

__all__ = ["InstanceData"]


class InstanceData(BaseDataElement):
    """The instances of an image, such as boxes and labels. All data fields have the same length.

    Values are tensors, arrays, lists, tuples, strings, or objects with `__len__`, `__getitem__` and `cat`. Indexing
    with an int, a slice, a list, an int64 or bool tensor, or an array returns an element with the selected instances;
    indexing with a string returns a field.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _PRIVATE:
            assert isinstance(value, Sized), (
                f"'{name}' must have a length, as tensors and lists do, but {type(value)} has none"
            )
            if len(self) > 0:
                assert len(value) == len(self), (
                    f"'{name}' has length {len(value)}, but the InstanceData has length {len(self)}"
                )
        super().__setattr__(name, value)

    __setitem__ = __setattr__

    def __len__(self) -> int:
        values = self.values()
        return len(values[0]) if values else 0

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, str):
            return getattr(self, item)
        item = self._index(item)
        new = type(self)(metainfo=self.metainfo)
        for key, value in self.items():
            new[key] = value[item] if isinstance(item, slice) else _select(key, value, item)
        return new

    def _index(self, item: Any) -> slice | torch.Tensor:
        """Convert an index to a slice or a 1-dim tensor."""
        if isinstance(item, list):
            item = np.array(item)
        if isinstance(item, np.ndarray):
            item = torch.from_numpy(item.astype(np.int64) if item.dtype == np.int32 else item)
        if isinstance(item, int):
            if not -len(self) <= item < len(self):
                raise IndexError(f"the index {item} is out of range for {len(self)} instances")
            return slice(item, None, len(self))  # keeps the first dimension
        if isinstance(item, slice):
            return item
        assert isinstance(item, torch.Tensor), (
            f"an index of type {type(item)} is not supported; use an int, a slice, a list, a tensor or an array"
        )
        assert item.dtype in (torch.bool, torch.int64), (
            f"an index of dtype {item.dtype} is not supported; use an int64 or bool tensor"
        )
        assert item.dim() == 1, (
            f"an index must have one dimension, not {item.dim()}, because only the first dimension can be indexed"
        )
        if item.dtype == torch.bool:
            assert len(item) == len(self), (
                f"the mask has length {len(item)}, but the InstanceData has length {len(self)}"
            )
        return item

    @staticmethod
    def cat(instances_list: Sequence[Any]) -> Any:
        """Concatenate the instances of elements that have the same fields.

        Raises:
            ValueError: if a value cannot be concatenated.
        """
        assert all(isinstance(part, InstanceData) for part in instances_list)
        assert len(instances_list) > 0
        first = instances_list[0]
        if len(instances_list) == 1:
            return first
        assert all(set(part.all_keys()) == set(first.all_keys()) for part in instances_list), (
            "the elements to concatenate must have the same fields"
        )
        new = type(first)(metainfo=first.metainfo)
        for key in first.keys():  # noqa: SIM118
            new[key] = _concatenate(key, [part[key] for part in instances_list])
        return new


def _select(key: str, value: Any, index: torch.Tensor) -> Any:
    if isinstance(value, torch.Tensor):
        return value[index]
    if isinstance(value, np.ndarray):
        return value[index.cpu().numpy()]
    positions = torch.nonzero(index).view(-1).tolist() if index.dtype == torch.bool else index.tolist()
    slices = [slice(position, None, len(value)) for position in positions] or [slice(None, 0, None)]
    parts = [value[part] for part in slices]
    if isinstance(value, str | list | tuple):
        return reduce(add, parts)
    if hasattr(value, "__getitem__") and hasattr(value, "cat"):
        return value.cat(parts)
    raise ValueError(
        f"'{key}' cannot be indexed with a tensor, because {type(value)} has no 'cat' method; define this method"
    )


def _concatenate(key: str, values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(values)
    if isinstance(first, np.ndarray):
        return np.concatenate(values)
    if isinstance(first, str | list | tuple):
        return reduce(add, values)
    if hasattr(first, "cat"):
        return first.cat(values)
    raise ValueError(
        f"'{key}' cannot be concatenated, because {type(first)} has no 'cat' method; define this method"
    )
