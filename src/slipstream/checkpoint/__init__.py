"""Save and load checkpoints, weights and random state."""

from slipstream.checkpoint.files import (
    find_latest_checkpoint,
    mark_last_checkpoint,
    plain,
    remove_checkpoint,
    save_checkpoint,
    write_text,
)
from slipstream.checkpoint.random_state import get_random_state, set_random_state
from slipstream.checkpoint.sharded import (
    consolidate,
    load_checkpoint,
    read_meta,
    sharded_name,
    write_checkpoint,
)
from slipstream.checkpoint.weights import load_weights, revise

__all__ = [
    "consolidate",
    "find_latest_checkpoint",
    "get_random_state",
    "load_checkpoint",
    "load_weights",
    "mark_last_checkpoint",
    "plain",
    "read_meta",
    "remove_checkpoint",
    "revise",
    "save_checkpoint",
    "set_random_state",
    "sharded_name",
    "write_checkpoint",
    "write_text",
]
