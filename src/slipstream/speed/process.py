"""Speed options that change process-wide settings, which are restored at the end of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["cudnn_benchmark", "expandable_segments"]

_EXPANDABLE = "expandable_segments"


@contextmanager
def cudnn_benchmark() -> Iterator[None]:
    """Enable cuDNN's benchmark mode within the context; if deterministic algorithms are enabled, disable it instead."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def expandable_segments() -> Iterator[None]:
    """Enable the allocator's expandable segments within the context, to reduce memory fragmentation.

    Only new allocations are affected. The other settings in
    PYTORCH_ALLOC_CONF are unchanged. The previous setting is restored on exit.
    """
    before = _allocator_settings()
    # Pass all settings, because torch resets some omitted settings to their defaults.
    torch._C._accelerator_setAllocatorSettings(_add_setting(before, f"{_EXPANDABLE}:True"))
    try:
        yield
    finally:
        after = before if _EXPANDABLE in before else _add_setting(before, f"{_EXPANDABLE}:False")
        torch._C._accelerator_setAllocatorSettings(after)


def _allocator_settings() -> str:
    """Return the current settings or, before torch 2.12, the settings at startup."""
    report = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    return os.environ.get("PYTORCH_ALLOC_CONF", "") if report is None else str(report())


def _add_setting(settings: str, setting: str) -> str:
    return f"{settings},{setting}" if settings else setting  # the last value of a setting takes precedence
