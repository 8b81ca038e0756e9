"""Flatten a configuration into a dict of built-in values with dotted paths as keys."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from datetime import date, time, timedelta
from enum import Enum
from functools import partial
from inspect import ismethod
from numbers import Number
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["flat_config", "has_unknown_value"]

_MAX_VALUES = 3000
_MAX_LENGTH = 300
_MAX_INLINE_ITEMS = 32
_WITH_COMPLETE_REPR = (
    Number | range | slice | re.Pattern | date | time | timedelta | Enum | np.generic | np.dtype,
    torch.dtype | torch.device | torch.layout | torch.memory_format,
)
"""Classes whose objects have a `repr` that contains the whole value and no secrets."""
_UNKNOWN_VALUE = re.compile(r"<redacted>|<[\w.]+ object>|.*<(lambda|locals)>.*", re.DOTALL)


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in nested dicts, lists and sets, keyed by dotted path, such as `train_dataloader.batch_size`.

    A short list of numbers and strings is one value, as is an empty dict. A function or a class is represented by its
    name. Numbers, strings, paths, dates, enums, numeric arrays, tensors and other types with a complete `repr` have
    different representations for different values. Any other object is represented by the name of its class. Long
    strings (over 300 characters) are shortened, and a digest is added. The values of large tensors, and all values
    after the first 3,000, are replaced with a digest.
    """
    values = dict(_leaves(config, ""))
    if len(values) <= _MAX_VALUES:
        return values
    items = list(values.items())
    rest = items[_MAX_VALUES:]
    return {
        **dict(items[:_MAX_VALUES]),
        "...": f"{len(rest)} more value{'s' * (len(rest) != 1)} ({_digest(_encode(json.dumps(rest)))})",
    }


def has_unknown_value(value: Any) -> bool:
    """Return whether a value from `flat_config` is ambiguous, that is, may represent different objects.

    This applies to secrets, lambdas, local functions, and objects that are represented by the name of their class.
    """
    return isinstance(value, str) and _UNKNOWN_VALUE.fullmatch(value) is not None


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, partial):
        value = {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    if isinstance(value, Mapping) and (value or not path):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple) and not _is_short(value):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}.{index}")
    elif isinstance(value, list | tuple):
        yield path, [_plain(item) for item in value]
    else:
        yield path, {} if isinstance(value, Mapping) else _plain(value)


def _is_short(values: list[Any] | tuple[Any, ...]) -> bool:
    plain = all(value is None or isinstance(value, bool | int | float | str) for value in values)
    return plain and len(values) <= _MAX_INLINE_ITEMS and len(str(values)) <= _MAX_LENGTH


def _plain(value: Any) -> Any:
    if isinstance(value, np.bool_ | np.integer | np.floating):
        value = value.item()
    if value is None or (isinstance(value, bool | int) and not isinstance(value, Enum)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Tensor) or (isinstance(value, np.ndarray) and value.dtype.kind in "biufc"):
        return _tensor_text(value)
    if isinstance(value, bytes):
        return f"{len(value)} byte{'s' * (len(value) != 1)} ({_digest(value)})"
    if isinstance(value, _WITH_COMPLETE_REPR):
        return _shorten(repr(value))
    if isinstance(value, str | PurePath):
        return _shorten(str(value))
    of_object = ismethod(value) and not isinstance(value.__self__, type)
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__") and not of_object):
        return f"{value.__module__}.{value.__qualname__}"
    return f"<{type(value).__name__} object>"


def _tensor_text(value: Tensor | np.ndarray[Any, Any]) -> str:
    """Return the class, the dtype, the shape, and the values, or a digest of the values if there are more than 32."""
    text = f"{type(value).__name__} {value.dtype} {tuple(value.shape)}"
    try:
        if math.prod(value.shape) <= _MAX_INLINE_ITEMS:
            return _shorten(f"{text} {value.tolist()}")
        array = (
            value.detach().cpu().contiguous().flatten().view(torch.uint8)
            if isinstance(value, Tensor)
            else value
        )
        return f"{text} ({_digest(np.ascontiguousarray(array).tobytes())})"
    except Exception:  # a tensor without readable values, for example on the meta device
        return f"<{type(value).__name__} object>"


def _shorten(text: str) -> str:
    return (
        text
        if len(text) <= _MAX_LENGTH
        else f"{text[:_MAX_LENGTH]}... ({len(text)} characters, {_digest(_encode(text))})"
    )


def _encode(text: str) -> bytes:
    return text.encode(errors="backslashreplace")


def _digest(data: bytes) -> str:
    return f"digest {hashlib.blake2b(data, digest_size=8).hexdigest()}"
