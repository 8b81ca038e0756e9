"""The Runner, its loops, and checkpoints."""

from slipstream.hooks import Priority, get_priority
from slipstream.openmmlab.mmengine.runner.amp import autocast
from slipstream.openmmlab.mmengine.runner.checkpoint import (
    CheckpointLoader,
    find_latest_checkpoint,
    get_state_dict,
    load_checkpoint,
    load_state_dict,
    save_checkpoint,
    weights_to_cpu,
)
from slipstream.openmmlab.mmengine.runner.runner import Runner
from slipstream.runner import (
    BaseLoop,
    EpochBasedTrainLoop,
    IterBasedTrainLoop,
    LogProcessor,
    TestLoop,
    ValLoop,
    set_random_seed,
)

__all__ = [
    "BaseLoop",
    "CheckpointLoader",
    "EpochBasedTrainLoop",
    "IterBasedTrainLoop",
    "LogProcessor",
    "Priority",
    "Runner",
    "TestLoop",
    "ValLoop",
    "autocast",
    "find_latest_checkpoint",
    "get_priority",
    "get_state_dict",
    "load_checkpoint",
    "load_state_dict",
    "save_checkpoint",
    "set_random_seed",
    "weights_to_cpu",
]
