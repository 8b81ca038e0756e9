"""Queries for the available devices."""

from __future__ import annotations

import torch

from slipstream.devices import device_type

__all__ = [
    "get_device",
    "get_max_cuda_memory",
    "is_cuda_available",
    "is_mlu_available",
    "is_mps_available",
    "is_musa_available",
    "is_npu_available",
]


def get_device() -> str:
    """Return the type of the default device, such as `cuda` or `cpu`."""
    return device_type()


def get_max_cuda_memory(device: torch.device | None = None) -> int:
    """Return the peak CUDA memory allocated since the last call, in MiB."""
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return int(peak // 2**20)


def is_cuda_available() -> bool:
    """Return whether CUDA is available."""
    return torch.cuda.is_available()


def is_mps_available() -> bool:
    """Return whether Apple's MPS is available."""
    return torch.backends.mps.is_available()


def is_npu_available() -> bool:
    """Return whether Ascend NPUs are available."""
    return device_type() == "npu"


def is_mlu_available() -> bool:
    """Return whether Cambricon MLUs are available."""
    return device_type() == "mlu"


def is_musa_available() -> bool:
    """Return whether Moore Threads GPUs are available."""
    return device_type() == "musa"
