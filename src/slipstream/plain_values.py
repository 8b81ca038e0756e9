"""Convert nested values to tensors and built-in Python values, which `torch.load` reads with `weights_only=True`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.sharding import is_sharded

_BASE_TYPES: tuple[Any, ...] = (int, float, complex, bytes)
PLAIN_TYPES = (bool, str, *_BASE_TYPES)
_OMITTED = object()


def plain(
    value: Any,
    warn: Callable[[str], None],
    where: str = "checkpoint",
    copy: Callable[[str, Tensor], Tensor] | None = None,
) -> Any:
    """Return a copy of `value`, with NumPy values converted to numbers or tensors, and unsupported values omitted.

    Args:
        value: nested containers of tensors and built-in Python values.
        warn: called with a message for each omitted value.
        where: name of `value` in messages.
        copy: called with the name of each tensor and the tensor itself; its result replaces the tensor. By default,
            tensors that are not sharded are moved to the CPU, so that they can be loaded on a machine without their
            device.
    """
    if isinstance(value, Tensor) and not is_sharded(value) and not hasattr(value, "__tensor_flatten__"):
        # A tensor's subclass and attributes would be pickled as objects. `detach` returns a new tensor without
        # attributes. `as_subclass` is called only for subclasses, because it does not support sparse tensors.
        value = value.detach()
        value = value if type(value) is Tensor else value.as_subclass(Tensor)
    copy = preserve_ties(_on_cpu) if copy is None else copy
    if isinstance(value, Tensor):
        return copy(where, value)
    if value is None or type(value) in PLAIN_TYPES:
        return value
    # Instances of subclasses (NumPy's float64, IntEnum) are pickled with their class, so convert them.
    for kind in _BASE_TYPES:
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, str):
        return str.__str__(value)
    is_number = (
        isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biuf" and value.itemsize <= 8
    )
    if is_number and isinstance(value, np.generic):
        return value.item()
    if is_number:
        return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("=")))
    if isinstance(value, Mapping):
        items = ((plain(k, warn, where), plain(v, warn, f"{where}.{k}", copy)) for k, v in value.items())
        return {k: v for k, v in items if k is not _OMITTED and v is not _OMITTED}
    if isinstance(value, list | tuple | set | frozenset):
        parts = [plain(v, warn, f"{where}[{i}]", copy) for i, v in enumerate(value)]
        parts = [part for part in parts if part is not _OMITTED]
        return tuple(parts) if isinstance(value, tuple) else parts
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, torch.device | torch.dtype):
        return value
    warn(
        f"{where} is not saved: {type(value).__name__} objects are not supported; only tensors and built-in "
        "Python values (number, string, list, dict, ...) can be saved"
    )
    return _OMITTED


def preserve_ties(copy: Callable[[str, Tensor], Tensor]) -> Callable[[str, Tensor], Tensor]:
    """Wrap `copy` so that it returns the same tensor for identical views of the same storage (tied weights)."""
    copies: dict[Any, Tensor] = {}

    def copy_once(where: str, tensor: Tensor) -> Tensor:
        if is_sharded(tensor) or tensor.layout is not torch.strided:
            return copy(where, tensor)
        storage = tensor.untyped_storage()._cdata
        view = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        key = (storage, tensor.dtype, view)
        if key not in copies:
            copies[key] = copy(where, tensor)
        return copies[key]

    return copy_once


def _on_cpu(where: str, tensor: Tensor) -> Tensor:
    return tensor if is_sharded(tensor) else tensor.cpu()
