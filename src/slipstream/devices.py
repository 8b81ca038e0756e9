"""The device on which this process trains."""

from __future__ import annotations

import torch


def default_device() -> torch.device:
    """Return the accelerator (CUDA, ROCm, NPU, XPU, MPS) with its index, or the CPU if none is available."""
    kind = device_type()
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.accelerator.current_device_index())


def device_type() -> str:
    """Return the type of `default_device` without initializing the device."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` reports a failed memory allocation on the device or the host."""
    # torch raises a RuntimeError if host memory cannot be allocated.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
