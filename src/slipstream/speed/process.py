"""Options: switches of the whole process, put back when a run ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from slipstream.errors import ConfigError

__all__ = ["cudnn_benchmark", "expandable_segments", "process_switches", "read_gc", "read_switch"]

_EXPANDABLE = "expandable_segments"


def read_switch(value: Any, name: str) -> bool:
    """Read a switch (`cudnn_benchmark`, `expandable_segments`): True, False or None.

    Raises:
        ConfigError: anything else; `name` is its place.
    """
    if value is None or isinstance(value, bool):
        return bool(value)
    raise ConfigError(f"must be True or False, not {value!r}", name)


def read_gc(value: Any) -> int | None:
    """Read `gc`: the steps between two collections; None and False leave Python's own rhythm.

    Raises:
        ConfigError: anything else.
    """
    if value is None or value is False:
        return None
    if type(value) is not int or value < 1:
        raise ConfigError(
            f"must be the number of steps between two collections (such as 1000), not {value!r}", "gc"
        )
    return value


@contextmanager
def process_switches(benchmark: bool, expandable: bool, warn: Callable[[str], None]) -> Iterator[None]:
    """Have the options `cudnn_benchmark` and `expandable_segments` on, as given, for as long as the context lasts."""
    with ExitStack() as stack:
        if benchmark:
            stack.enter_context(cudnn_benchmark())
        if expandable:
            stack.enter_context(expandable_segments(warn))
        yield


@contextmanager
def cudnn_benchmark() -> Iterator[None]:
    """Let cuDNN time its algorithms for each new shape, unless only deterministic algorithms may run."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def expandable_segments(warn: Callable[[str], None]) -> Iterator[None]:
    """Let the device's memory grow in segments that can be extended, which leaves less of it in unusable pieces.

    It concerns what the device allocates from now on; `warn` hears of memory that is reserved already. What
    PYTORCH_ALLOC_CONF says besides stays in force, and its own word on this comes back at the end.
    """
    before = torch._C._accelerator_getAllocatorSettings()
    # The settings are always set as a whole: some of those left out would go back to torch's defaults.
    torch._C._accelerator_setAllocatorSettings(_with(before, f"{_EXPANDABLE}:True"))
    if (reserved := _reserved_bytes()) and _EXPANDABLE not in before:
        warn(
            f"expandable_segments: {reserved / 2**20:.0f} MiB were reserved before, and stay as they are. To have all "
            "of it in such segments, start with PYTORCH_ALLOC_CONF=expandable_segments:True"
        )
    try:
        yield
    finally:
        after = before if _EXPANDABLE in before else _with(before, f"{_EXPANDABLE}:False")
        torch._C._accelerator_setAllocatorSettings(after)


def _with(settings: str, one: str) -> str:
    return f"{settings},{one}" if settings else one  # of two words on one thing the later counts


def _reserved_bytes() -> int:
    started = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.cuda.memory_reserved() if started else 0
