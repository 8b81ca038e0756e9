"""Copy, compare and restore the attributes that user-defined schedulers add."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.typecheck import is_real

__all__ = ["own_attributes", "restored_attributes", "same"]

_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_SEQUENCES = (list, tuple, set, frozenset, deque)
# Checkpoints store sets and deques as lists. `_convert` converts a list back only if it is an attribute's value, not if
# it is nested in another container.
_NESTED = (list, tuple)


def own_attributes(scheduler: Any, ignored: Collection[str]) -> dict[str, Any]:
    """Return copies of the attributes that can be stored in a checkpoint, except those in `ignored`."""
    kind = type(scheduler)
    return {
        name: copy.deepcopy(value.detach() if isinstance(value, Tensor) else value)
        for name, value in vars(scheduler).items()
        if name not in ignored
        and not isinstance(getattr(kind, name, None), cached_property)
        and _is_plain(value)
    }


def _is_plain(value: Any, types: Collection[type] = _SEQUENCES) -> bool:
    if type(value) in types:
        return all(_is_plain(item, _NESTED) for item in value)
    if isinstance(value, dict):
        return all(type(key) in _SCALARS and _is_plain(item, _NESTED) for key, item in value.items())
    return type(value) in _SCALARS or isinstance(value, Tensor)


def same(one: Any, other: Any) -> bool:
    """Return whether two values have the same types and contents."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def restored_attributes(scheduler: Any, saved: Any, ignored: Collection[str]) -> dict[str, Any]:
    """Return the saved attributes, converted to the types of the scheduler's attributes.

    Raises:
        CheckpointError: a name is not a valid scheduler attribute, or a value has a different type.
    """
    name, own = type(scheduler).__name__, vars(scheduler)
    if not isinstance(saved, Mapping):
        raise CheckpointError(
            f"'attributes' of {name} must be a dict, not {type(saved).__name__}; the checkpoint is damaged"
        )
    restored = {}
    for key, value in saved.items():
        inherited = isinstance(key, str) and hasattr(type(scheduler), key) and key not in own
        if not isinstance(key, str) or key in ignored or inherited:
            raise CheckpointError(
                f"'attributes' of {name} contains {key!r}, which is not an attribute that {name} restores; resume with "
                "the class that wrote the checkpoint"
            )
        current = own.get(key)
        fits, restored[key] = _convert(current, copy.deepcopy(value))
        if not fits:
            raise CheckpointError(
                f"the attribute '{key}' of {name} must have type {type(current).__name__}, not "
                f"{type(value).__name__}; resume with the class that wrote the checkpoint"
            )
    return restored


def _convert(current: Any, value: Any) -> tuple[bool, Any]:
    """Return whether `value` can replace `current`, and `value` converted to the type of `current`.

    Checkpoints store sets and deques as lists.
    """
    if current is None or value is None or type(value) is type(current):
        device = current.device if isinstance(current, Tensor) else None
        return True, value.to(device) if device is not None and isinstance(value, Tensor) else value
    if is_real(current):
        return is_real(value), value
    if isinstance(current, Tensor):
        return isinstance(value, Tensor), value.to(current.device) if isinstance(value, Tensor) else value
    if isinstance(current, _SEQUENCES) and isinstance(value, _SEQUENCES):
        return True, deque(value, current.maxlen) if isinstance(current, deque) else type(current)(value)
    if isinstance(current, dict) and isinstance(value, Mapping):
        restored = copy.copy(current)  # keeps the type, and a defaultdict's default_factory
        restored.clear()
        restored.update(value)
        return True, restored
    return False, value
