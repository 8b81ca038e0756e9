"""Save and load checkpoints, weights and random state."""

from slipstream.checkpoint.background import BackgroundWriter
from slipstream.checkpoint.files import remove_checkpoint, save_checkpoint
from slipstream.checkpoint.matching import check_like, check_optimizer, check_tensors, restoring
from slipstream.checkpoint.owner import LOCK_FILE, describe_owner, folder_owner
from slipstream.checkpoint.random_state import get_random_state, set_random_state
from slipstream.checkpoint.remote import download_checkpoint, local_checkpoint, redacted_source
from slipstream.checkpoint.restorable import check_restorable
from slipstream.checkpoint.schema import (
    ACCELERATED,
    ACCELERATED_FILE,
    DESCRIPTION,
    META,
    OPTIMIZER,
    PENDING,
    RESUMED,
    check,
    step_average,
    weights_in,
)
from slipstream.checkpoint.search import (
    checkpoint_of,
    find_latest_checkpoint,
    mark_last_checkpoint,
    newest_checkpoints,
)
from slipstream.checkpoint.sharded import (
    consolidate,
    load_checkpoint,
    read_meta,
    read_origin,
    read_without_data,
    remove_partial_checkpoints,
    sharded_name,
    verify_checkpoint,
    write_checkpoint,
)
from slipstream.checkpoint.stored_config import stored_config
from slipstream.checkpoint.weights import compare_weights, load_weights, loaded_names, revise

__all__ = [
    "ACCELERATED",
    "ACCELERATED_FILE",
    "DESCRIPTION",
    "LOCK_FILE",
    "META",
    "OPTIMIZER",
    "PENDING",
    "RESUMED",
    "BackgroundWriter",
    "check",
    "check_like",
    "check_optimizer",
    "check_restorable",
    "check_tensors",
    "checkpoint_of",
    "compare_weights",
    "consolidate",
    "describe_owner",
    "download_checkpoint",
    "find_latest_checkpoint",
    "folder_owner",
    "get_random_state",
    "load_checkpoint",
    "load_weights",
    "loaded_names",
    "local_checkpoint",
    "mark_last_checkpoint",
    "newest_checkpoints",
    "read_meta",
    "read_origin",
    "read_without_data",
    "redacted_source",
    "remove_checkpoint",
    "remove_partial_checkpoints",
    "restoring",
    "revise",
    "save_checkpoint",
    "set_random_state",
    "sharded_name",
    "step_average",
    "stored_config",
    "verify_checkpoint",
    "weights_in",
    "write_checkpoint",
]
