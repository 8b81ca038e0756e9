"""Save a training step from `accelerate` to a file, and load it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.checkpoint import (
    ACCELERATED_FILE,
    check,
    check_restorable,
    get_random_state,
    load_checkpoint,
    set_random_state,
    write_checkpoint,
)
from slipstream.checkpoint.weights import compare_weights
from slipstream.dist import all_gather_object, get_rank, get_world_size
from slipstream.errors import CheckpointError
from slipstream.model import unwrap_model
from slipstream.speed.step_state import own_remedy

if TYPE_CHECKING:
    from slipstream.speed.accelerate import TrainStep

__all__ = ["load_step", "save_step"]


def save_step(step: TrainStep, path: str | Path, values: Mapping[str, Any]) -> None:
    """Write the model, the step, the random states and `values` to `path`; see `TrainStep.save`."""
    if get_world_size() > 1 and not step.optim.begins_window():
        raise CheckpointError(
            "an accumulation window is unfinished, and each process has its own gradients; save when the window ends "
            "(step.updated is True)"
        )
    state = unwrap_model(step.model).state_dict()
    check_restorable(state)
    content = {
        "state_dict": state,
        "step": step.state_dict(),
        "random_state": all_gather_object(get_random_state()),
        "values": dict(values),
    }
    write_checkpoint(content, Path(path), _refuse)


def load_step(step: TrainStep, path: str | Path) -> dict[str, Any]:
    """Load a file written by `save_step`, and return `values`; see `TrainStep.load`."""
    source = str(path)
    content = load_checkpoint(path)
    check(content, ACCELERATED_FILE, source)
    model = unwrap_model(step.model)
    with own_remedy(". Load it into a step that uses the same model"):
        compare_weights(model, content["state_dict"], True, source)
    step.check_state(content["step"], source)
    model.load_state_dict(content["state_dict"])
    step.load_state_dict(content["step"])
    states = content.get("random_state") or []
    if get_rank() < len(states):
        set_random_state(states[get_rank()])
    return dict(content.get("values", {}))


def _refuse(message: str) -> None:
    raise CheckpointError(message.replace("checkpoint.", "", 1))
