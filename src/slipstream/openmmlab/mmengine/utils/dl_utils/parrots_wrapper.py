"""PyTorch's version and norm classes under MMEngine's names."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

__all__ = ["TORCH_VERSION", "SyncBatchNorm", "_BatchNorm", "_InstanceNorm", "is_rocm_pytorch"]

TORCH_VERSION = str(torch.__version__)
SyncBatchNorm = nn.SyncBatchNorm


def is_rocm_pytorch() -> bool:
    """Return whether torch is built for ROCm."""
    return torch.version.hip is not None
