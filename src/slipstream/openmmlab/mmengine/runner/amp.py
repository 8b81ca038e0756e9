"""Autocast."""

from __future__ import annotations

import torch

from slipstream.devices import device_type as default_type

__all__ = ["autocast"]


def autocast(
    device_type: str | None = None,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> torch.autocast:
    """Return a `torch.autocast` context manager, by default for the default device and its autocast dtype."""
    return torch.autocast(
        default_type() if device_type is None else device_type,
        dtype=dtype,
        enabled=enabled,
        cache_enabled=cache_enabled,
    )
