"""Wrappers for distributed training."""

from slipstream.model.wrappers.distributed import (
    MMDistributedDataParallel,
    MMSeparateDistributedDataParallel,
    check_comm_hook_state,
    comm_hook_state,
    device_ids,
    is_model_wrapper,
    load_comm_hook_state,
    unwrap_model,
)
from slipstream.model.wrappers.fully_sharded import (
    FullyShardedOptions,
    MMFullyShardedDataParallel,
    drop_unsharded_gradients,
    full_weights,
    unsharded_gradients,
)

__all__ = [
    "FullyShardedOptions",
    "MMDistributedDataParallel",
    "MMFullyShardedDataParallel",
    "MMSeparateDistributedDataParallel",
    "check_comm_hook_state",
    "comm_hook_state",
    "device_ids",
    "drop_unsharded_gradients",
    "full_weights",
    "is_model_wrapper",
    "load_comm_hook_state",
    "unsharded_gradients",
    "unwrap_model",
]
