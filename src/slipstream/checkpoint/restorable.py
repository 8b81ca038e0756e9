"""Find state in a model that a checkpoint cannot contain, or that cannot be loaded from a checkpoint."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import ModelError

__all__ = ["check_restorable"]

_SCALARS = (int, float, complex, str, bytes, np.bool_, np.number, torch.dtype, torch.device)


def check_restorable(state: Mapping[str, Any]) -> None:
    """Check that a model's `state_dict` can be saved and loaded without changes.

    Raises:
        ModelError: an entry contains a value that a checkpoint cannot contain, or a tensor that cannot be written to.
    """
    for key, value in state.items():
        if isinstance(value, Tensor):
            if value.layout is torch.strided and _is_expanded(value):
                raise ModelError(
                    f"the model's buffer '{key}' is an expanded tensor. Several of its elements share memory, "
                    "so it cannot be loaded from a checkpoint; register a copy of it (tensor.clone())"
                )
        elif kind := _unsupported(value):
            raise ModelError(
                f"the model's state '{key}' contains an object of type {kind}, which cannot be restored from a "
                "checkpoint; return only tensors and built-in Python values (number, string, list, tuple, dict) from "
                "get_extra_state, and convert them in set_extra_state"
            )


def _is_expanded(tensor: Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _unsupported(value: Any) -> str:
    """Return the name of the first type in `value` that a checkpoint omits or converts, or an empty string."""
    if type(value) in (dict, OrderedDict):
        value = [*value.keys(), *value.values()]
    if type(value) in (list, tuple):
        return next(filter(None, map(_unsupported, value)), "")
    return "" if value is None or isinstance(value, (Tensor, *_SCALARS)) else type(value).__name__
