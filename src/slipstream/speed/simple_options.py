"""Read options implemented in other packages: `sync_bn` (model), `accumulate` and `clip_grad` (optimizer wrapper)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.errors import ConfigError
from slipstream.optim.optim_wrapper import GradClip

__all__ = ["read_accumulate", "read_clip_grad", "read_sync_bn"]


def read_sync_bn(value: Any) -> bool:
    """Read `sync_bn`: True, False, None, or MMEngine's `'torch'`, which is the same as True.

    Raises:
        ConfigError: the value is not one of these.
    """
    if value in (None, False, True, "torch"):
        return bool(value)
    raise ConfigError(f"must be 'torch' (or True), not {value!r}", "sync_bn")


def read_accumulate(value: Any) -> int:
    """Read `accumulate`: the number of batches per optimizer step.

    Raises:
        ConfigError: the value is not an integer, or is below 1.
    """
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"the number of batches per optimizer step must be an int of at least 1, not {value!r}",
            "accumulate",
        )
    return value


def read_clip_grad(value: Any) -> GradClip | None:
    """Read `clip_grad`: `dict(max_norm=...)` or `dict(type='value', clip_value=...)`; False and None disable it.

    Raises:
        ConfigError: the value is not a dict, or the dict is invalid (see `GradClip.from_dict`).
    """
    if isinstance(value, GradClip):
        return value
    if not value:
        return None
    if not isinstance(value, Mapping):
        raise ConfigError(f"must be a dict such as dict(max_norm=35), not {value!r}", "clip_grad")
    return GradClip.from_dict(value)
