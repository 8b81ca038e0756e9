"""`PixelData`: data fields of shape (C, H, W) that all have the same height and width."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from slipstream.openmmlab.mmengine.structures.base_data_element import _PRIVATE, BaseDataElement

__all__ = ["PixelData"]


class PixelData(BaseDataElement):
    """Per-pixel maps: tensors or arrays of shape (C, H, W). Maps of shape (H, W) are stored with shape (1, H, W).

    Indexing with two ints or slices crops the height and width of all maps; an int keeps one row or column.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _PRIVATE:
            super().__setattr__(name, value)
            return
        assert isinstance(value, torch.Tensor | np.ndarray), (
            f"'{name}' must be a tensor or an array, not {type(value)}"
        )
        size = tuple(value.shape[-2:])
        if self.shape:
            assert size == self.shape, f"'{name}' has size {size}, but the PixelData has size {self.shape}"
        assert value.ndim in (2, 3), f"'{name}' must have 2 or 3 dimensions, not {value.ndim}"
        if value.ndim == 2:
            value = value[None]
            warnings.warn(
                f"'{name}' has shape {size} and is stored with shape {tuple(value.shape)}", stacklevel=2
            )
        super().__setattr__(name, value)

    def __getitem__(self, item: Any) -> PixelData:
        if not isinstance(item, tuple):
            raise TypeError(f"PixelData must be indexed with two ints or slices, not {type(item)}")
        assert len(item) == 2, f"PixelData must be indexed with two ints or slices, not {len(item)}"
        size = self.shape or (None, None)
        rows, columns = (_as_slice(part, length) for part, length in zip(item, size, strict=True))
        new = type(self)(metainfo=self.metainfo)
        for key, value in self.items():
            setattr(new, key, value[:, rows, columns])
        return new

    @property
    def shape(self) -> tuple[int, int] | None:
        """Height and width, or None if there are no data fields."""
        return tuple(self.values()[0].shape[-2:]) if self._data_fields else None


def _as_slice(part: Any, length: int | None) -> slice:
    if isinstance(part, int):
        return slice(part, None, length)  # a slice keeps the dimension
    if isinstance(part, slice):
        return part
    raise TypeError(f"PixelData must be indexed with two ints or slices, not {type(part)}")
