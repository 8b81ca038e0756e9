"""Flatten a configuration into a dict of built-in values with dotted paths as keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import PurePath
from typing import Any

__all__ = ["flat_config"]

_MAX_VALUES = 3000
_MAX_LENGTH = 300
_MAX_INLINE_ITEMS = 32


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in nested dicts and lists, keyed by dotted path, such as `train_dataloader.batch_size`.

    A short list of numbers and strings is converted to a string. Objects are represented by their class names. At most
    3,000 values are returned, with at most 300 characters each.
    """
    return dict(islice(_leaves(config, ""), _MAX_VALUES))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple) and not _is_short(value):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}.{index}")
    elif isinstance(value, list | tuple):
        yield path, _truncate(f"[{', '.join(map(str, value))}]")
    else:
        yield path, _plain(value)


def _is_short(values: list[Any] | tuple[Any, ...]) -> bool:
    plain = all(value is None or isinstance(value, bool | int | float | str) for value in values)
    return plain and len(values) <= _MAX_INLINE_ITEMS


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str | PurePath):
        return _truncate(str(value))
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{value.__module__}.{value.__qualname__}"
    return f"<{type(value).__name__}>"


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 3]}..."
