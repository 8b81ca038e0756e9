"""Wrappers for distributed training."""

from __future__ import annotations

from torch import nn

from slipstream.model.wrappers import (
    MMDistributedDataParallel,
    MMFullyShardedDataParallel,
    MMSeparateDistributedDataParallel,
)
from slipstream.model.wrappers import is_model_wrapper as is_own_wrapper
from slipstream.openmmlab.mmengine.registry import MODEL_WRAPPERS
from slipstream.registry import Registry

__all__ = [
    "MMDistributedDataParallel",
    "MMFullyShardedDataParallel",
    "MMSeparateDistributedDataParallel",
    "is_model_wrapper",
]


def is_model_wrapper(model: nn.Module, registry: Registry = MODEL_WRAPPERS) -> bool:
    """Return whether a module is an instance of a wrapper that is registered in `registry` or its children.

    The default is MMEngine's registry, which also contains the wrappers from torch and Slipstream.
    """
    if registry is MODEL_WRAPPERS and is_own_wrapper(model):
        return True
    if isinstance(model, tuple(registry.module_dict.values())):
        return True
    return any(is_model_wrapper(model, child) for child in registry.children.values())
