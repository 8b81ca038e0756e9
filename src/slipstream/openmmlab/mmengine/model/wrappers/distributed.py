"""Wrappers for distributed training, at MMEngine's module path."""

from slipstream.openmmlab.mmengine.model import MMDistributedDataParallel

__all__ = ["MMDistributedDataParallel"]
