"""Wrappers that spread a model over processes."""

from slipstream.model.wrappers.distributed import (
    MMDistributedDataParallel,
    MMSeparateDistributedDataParallel,
    device_ids,
    is_model_wrapper,
    unwrap_model,
)

__all__ = [
    "MMDistributedDataParallel",
    "MMSeparateDistributedDataParallel",
    "device_ids",
    "is_model_wrapper",
    "unwrap_model",
]
