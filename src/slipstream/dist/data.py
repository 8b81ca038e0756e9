"""Query and change the device of tensors in nested dicts, lists and tuples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import DataError

__all__ = ["cast_data_device", "get_data_device"]


def get_data_device(data: Tensor | Mapping[Any, Any] | Iterable[Any]) -> torch.device:
    """Return the device of all tensors in `data`.

    Args:
        data: a tensor, or nested dicts, lists and tuples of tensors.

    Raises:
        DataError: `data` contains no tensors, an object that is not a tensor, or tensors on different devices.
    """
    devices = {tensor.device for tensor in _tensors(data)}
    if len(devices) == 1:
        return devices.pop()
    if not devices:
        raise DataError("the data contains no tensors, so it has no device")
    raise DataError(
        "all tensors in the data must be on the same device, but they are on the devices "
        f"{', '.join(sorted(map(str, devices)))}"
    )


def cast_data_device(data: Any, device: torch.device, out: Any = None) -> Any:
    """Return `data` with every tensor on `device`, in the same structure of dicts, lists and tuples.

    Args:
        data: a tensor, or nested dicts, lists and tuples of tensors.
        device: target device.
        out: optional output with the same structure as `data`. Its tensors are overwritten, and `out` is returned.

    Raises:
        DataError: `data` contains an object that is not a tensor, or the structure of `out` differs.
    """
    if isinstance(data, Tensor):
        if out is None:
            return data.to(device)
        if not isinstance(out, Tensor):
            raise DataError(f"`out` must have a tensor for each tensor in the data, not {type(out).__name__}")
        return out.copy_(data)
    if isinstance(data, Mapping):
        keys, parts = list(data), list(data.values())
    elif isinstance(data, (list, tuple)):
        keys, parts = list(range(len(data))), list(data)
    else:
        raise DataError(
            f"the data must consist of tensors in dicts, lists or tuples, not {type(data).__name__}"
        )
    if out is None:
        return _rebuild(data, keys, [cast_data_device(part, device) for part in parts])
    same = set(out) == set(keys) if isinstance(out, Mapping) else len(out) == len(keys)
    if isinstance(out, Mapping) != isinstance(data, Mapping) or not same:
        raise DataError("`out` must have the same structure as the data: the same keys and lengths")
    for key, part in zip(keys, parts, strict=True):
        cast_data_device(part, device, out[key])
    return out


def _rebuild(data: Any, keys: list[Any], parts: list[Any]) -> Any:
    if isinstance(data, Mapping):
        return type(data)(zip(keys, parts, strict=True))  # type: ignore[call-arg]
    return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)


def _tensors(data: Any) -> Iterator[Tensor]:
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, Iterable) and not isinstance(data, (str, bytes)):
        for part in data.values() if isinstance(data, Mapping) else data:
            yield from _tensors(part)
    else:
        raise DataError(
            f"the data must consist of tensors in dicts, lists or tuples, not {type(data).__name__}"
        )
