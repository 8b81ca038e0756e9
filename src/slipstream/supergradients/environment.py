"""SuperGradients' functions for setting up the process: devices, ranks and loggers."""

from __future__ import annotations

import logging
from typing import Any

from slipstream.devices import device_type
from slipstream.dist import infer_launcher, master_only
from slipstream.errors import ConfigError

__all__ = [
    "SUPPORTED_VERSION",
    "get_logger",
    "init_trainer",
    "is_distributed",
    "multi_process_safe",
    "setup_device",
]

SUPPORTED_VERSION = "3.7.1"
"""The version of SuperGradients whose interface this package implements."""

_MULTI_DEVICE_MODES = ("DDP", "DP", "AUTO")

multi_process_safe = master_only


def init_trainer() -> None:
    """Do nothing, because the Runner sets up the process."""


def is_distributed() -> bool:
    """Return whether this process was started by a launcher."""
    return infer_launcher() != "none"


def get_logger(logger_name: str = "slipstream", log_level: Any = None) -> logging.Logger:
    """Return a logger from Python's `logging`."""
    logger = logging.getLogger(logger_name)
    if log_level is not None:
        logger.setLevel(log_level)
    return logger


def setup_device(multi_gpu: Any = None, num_gpus: int | None = None, device: str | None = "cuda") -> None:
    """Check that the process runs on the requested devices.

    The devices are determined by the machine and the launcher, not by this function.

    Args:
        multi_gpu: a `MultiGPUMode`, its name, or a device, as in `setup_device('cpu')`.
        num_gpus: number of devices; -1 for all, 0 for the CPU.
        device: 'cuda' for the machine's accelerator, if available, or 'cpu'.

    Raises:
        ConfigError: `device` is invalid, or the script must be started differently; the message explains how.
    """
    import torch

    if multi_gpu in ("cpu", "cuda"):  # SuperGradients' documentation passes the device as the first argument
        multi_gpu, device = None, multi_gpu
    if device not in (None, "cpu", "cuda"):
        raise ConfigError(f"must be 'cpu' or 'cuda', not {device!r}", "device")
    kind = device_type()
    if (device == "cpu" or num_gpus == 0) and kind != "cpu":
        variable = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}.get(kind)
        remedy = (
            f"start the script with {variable}= (empty)"
            if variable
            else "hide the accelerator from the process"
        )
        raise ConfigError(
            f"the Runner uses the machine's accelerator ({kind}); to train on the CPU, {remedy}", "device"
        )
    name = str(getattr(multi_gpu, "value", multi_gpu)).upper()
    requested = num_gpus if num_gpus is not None else -1 if name in _MULTI_DEVICE_MODES else 1
    available = torch.accelerator.device_count() if kind != "cpu" else 1
    count = available if requested == -1 else requested
    if min(count, available) > 1 and not is_distributed():
        raise ConfigError(
            f"to train on {count} devices, start the script with torchrun --nproc-per-node {count} -m "
            "slipstream.supergradients SCRIPT.py",
            "num_gpus" if num_gpus is not None else "multi_gpu",
        )
