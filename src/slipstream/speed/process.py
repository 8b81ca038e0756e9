"""Speed options that change process-wide settings, which are restored at the end of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from slipstream.errors import ConfigError

__all__ = ["cuda_settings", "cudnn_benchmark", "expandable_segments", "read_bool", "read_gc"]

_EXPANDABLE = "expandable_segments"


def read_bool(value: Any, name: str) -> bool:
    """Read a boolean option (such as `cudnn_benchmark`): True, False or None.

    Raises:
        ConfigError: the value has an unsupported type; `name` is its config path.
    """
    if value is None or isinstance(value, bool):
        return bool(value)
    raise ConfigError(f"must be True or False, not {value!r}", name)


def read_gc(value: Any) -> int | None:
    """Read `gc`: the number of steps between garbage collections; None and False keep automatic collection.

    Raises:
        ConfigError: the value is not a positive integer.
    """
    if value is None or value is False:
        return None
    if type(value) is not int or value < 1:
        raise ConfigError(
            f"must be the number of steps between garbage collections (such as 1000), not {value!r}", "gc"
        )
    return value


@contextmanager
def cuda_settings(benchmark: bool, expandable: bool, warn: Callable[[str], None]) -> Iterator[None]:
    """Within the context, enable cuDNN's benchmark mode and the allocator's expandable segments, if requested."""
    with ExitStack() as stack:
        if benchmark:
            stack.enter_context(cudnn_benchmark())
        if expandable:
            stack.enter_context(expandable_segments(warn))
        yield


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
def expandable_segments(warn: Callable[[str], None]) -> Iterator[None]:
    """Enable the allocator's expandable segments within the context, to reduce memory fragmentation.

    Only new allocations are affected; `warn` is called if memory is already reserved. The other settings in
    PYTORCH_ALLOC_CONF are unchanged. The previous setting is restored on exit.
    """
    before = _allocator_settings()
    # Pass all settings, because torch resets some omitted settings to their defaults.
    torch._C._accelerator_setAllocatorSettings(_add_setting(before, f"{_EXPANDABLE}:True"))
    if (reserved := _reserved_bytes()) and _EXPANDABLE not in before:
        warn(
            f"expandable_segments does not affect the {reserved / 2**20:.0f} MiB already reserved. To use it for "
            "all memory, start the process with PYTORCH_ALLOC_CONF=expandable_segments:True"
        )
    try:
        yield
    finally:
        after = before if _EXPANDABLE in before else _add_setting(before, f"{_EXPANDABLE}:False")
        torch._C._accelerator_setAllocatorSettings(after)


def _allocator_settings() -> str:
    """Return the current settings or, before torch 2.12, the settings at startup."""
    report = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if report is not None:
        return str(report())
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def _add_setting(settings: str, setting: str) -> str:
    return f"{settings},{setting}" if settings else setting  # the last value of a setting takes precedence


def _reserved_bytes() -> int:
    started = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.cuda.memory_reserved() if started else 0
