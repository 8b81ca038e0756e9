"""Find the checkpoint to resume; save and restore weights, optimizer state and schedulers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.checkpoint import (
    find_latest_checkpoint,
    load_checkpoint,
    read_meta,
    revise,
)
from slipstream.dist import (
    all_reduce,
    all_reduce_params,
    broadcast,
    broadcast_object_list,
    get_rank,
    is_main_process,
)
from slipstream.dist.sharding import is_sharded, local, mesh_of, shard_like
from slipstream.errors import CheckpointError, NonFiniteLossError
from slipstream.model import unwrap_model
from slipstream.model.wrappers import (
    comm_hook_state,
    load_comm_hook_state,
    unsharded_gradients,
    whole_weights,
)
from slipstream.optim import OptimWrapper

__all__ = [
    "check_complete",
    "check_weights",
    "find_resume",
    "init_weights",
    "optimizer_state",
    "read_checkpoint",
    "restore_optimizer",
    "restore_schedulers",
    "scheduler_states",
]


def find_resume(
    resume: bool | str | Path, load_from: str | Path | None, work_dir: str
) -> tuple[Path | None, int | None]:
    """Return the checkpoint to resume from and the seed of the run that wrote it, or (None, None).

    Rank 0 searches for the checkpoint and broadcasts the result, because the work_dir may only exist on its machine.

    Raises:
        CheckpointError: the checkpoint cannot be read, or a rank cannot access it.
    """
    found: list[Any] = [None, None, None]
    if is_main_process():
        try:
            found[:2] = _find_resume(resume, load_from, work_dir)
        except CheckpointError as error:
            found[2] = error
    broadcast_object_list(found)
    path, seed, problem = found
    if problem is not None:
        raise problem
    if path is not None and not path.exists():
        raise CheckpointError(
            f"rank {get_rank()} cannot access {path}; put the work_dir on a shared file system"
        )
    return path, seed


def _find_resume(
    resume: bool | str | Path, load_from: str | Path | None, work_dir: str
) -> tuple[Path | None, int | None]:
    if resume is True:
        path = Path(load_from) if load_from else find_latest_checkpoint(work_dir)
    else:
        path = Path(resume) if resume else None
    if path is None:
        return None, None
    return path, read_meta(path).get("seed")


def init_weights(model: nn.Module) -> None:
    """Call `init_weights` of the (unwrapped) model and broadcast rank 0's weights."""
    if not hasattr(model, "init_weights"):
        return
    with whole_weights(model):
        model.init_weights()  # type: ignore[operator]
        for tensor in chain(model.parameters(), model.buffers()):
            broadcast(tensor.detach())  # the wrapper broadcast the weights before this initialization


def read_checkpoint(
    model: nn.Module,
    path: str | Path,
    map_location: str | torch.device,
    revise_keys: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    """Read a checkpoint; rename and shard the weights in `state_dict` like those of the unwrapped model."""
    checkpoint = load_checkpoint(path, map_location, mesh_of(model))
    checkpoint.setdefault("state_dict", {k: v for k, v in checkpoint.items() if isinstance(v, Tensor)})
    # Remove a wrapper's prefix, unless the model has a submodule with the same name.
    parameters, prefix = dict(model.named_parameters()), "module."
    own = any(key.startswith(prefix) for key in model.state_dict())
    checkpoint["state_dict"] = revise(checkpoint["state_dict"], () if own else revise_keys)
    for part in ("state_dict", "ema_state_dict"):
        for key, value in checkpoint.get(part, {}).items():
            own_param = parameters.get(key, parameters.get(key.removeprefix(prefix)))
            checkpoint[part][key] = shard_like(value, own_param)
    return checkpoint


def check_complete(checkpoint: Mapping[str, Any], warn: Callable[[str], None]) -> None:
    """Check that a checkpoint contains more than weights.

    Raises:
        CheckpointError: the checkpoint does not contain a run's position.
    """
    if "ema_state_dict" in checkpoint:  # an EMAHook would have removed the key
        warn(
            "The checkpoint contains averaged weights, but the Runner has no EMAHook: training continues from the "
            "averaged weights"
        )
    if "iter" not in checkpoint.get("meta", {}):
        raise CheckpointError("the checkpoint only contains weights and cannot be resumed; use load_from")


def optimizer_state(model: nn.Module, optim: OptimWrapper) -> dict[str, Any]:
    """Return the checkpoint entries of the optimizer and of an unfinished accumulation window."""
    state: dict[str, Any] = {"optimizer": optim.state_dict()}
    if gradients := _pending_gradients(unwrap_model(model)):
        state["gradients"] = gradients
    if remembered := comm_hook_state(model):
        state["comm_hook"] = remembered
    return state


def restore_optimizer(model: nn.Module, optim: OptimWrapper, checkpoint: Mapping[str, Any]) -> None:
    """Restore the entries returned by `optimizer_state`.

    Raises:
        CheckpointError: the checkpoint has no optimizer state.
    """
    optim.load_state_dict(_required(checkpoint, "optimizer"))
    parameters = dict(unwrap_model(model).named_parameters())
    for name, gradient in checkpoint.get("gradients", {}).items():
        parameters[name].grad = shard_like(gradient, parameters[name]).to(parameters[name].device)
    load_comm_hook_state(model, checkpoint.get("comm_hook", {}))


def scheduler_states(schedulers: list[Any] | dict[str, list[Any]]) -> Any:
    """Return the states of the schedulers."""
    if isinstance(schedulers, dict):
        return {name: scheduler_states(part) for name, part in schedulers.items()}
    return [scheduler.state_dict() for scheduler in schedulers]


def restore_schedulers(schedulers: list[Any] | dict[str, list[Any]], checkpoint: Mapping[str, Any]) -> None:
    """Restore the schedulers from a checkpoint.

    Raises:
        CheckpointError: the checkpoint has no schedulers, or a different number of them.
    """
    states = _required(checkpoint, "param_schedulers")
    pairs: list[tuple[list[Any], list[Any]]] = (
        [(part, states.get(name, [])) for name, part in schedulers.items()]
        if isinstance(schedulers, dict)
        else [(schedulers, states)]
    )
    for own, saved in pairs:
        if len(own) != len(saved):
            raise CheckpointError(
                f"the checkpoint has {len(saved)} parameter schedulers, but the configuration has {len(own)}; "
                "resume with the same param_scheduler, or start a new run with load_from"
            )
        for scheduler, state in zip(own, saved, strict=True):
            scheduler.load_state_dict(state)


def _pending_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of an unfinished accumulation window, averaged over all ranks."""
    parameters = dict(model.named_parameters())
    gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    gradients |= unsharded_gradients(model)
    # Sharded gradients are already averaged.
    plain = {name: gradient for name, gradient in gradients.items() if not is_sharded(gradient)}
    all_reduce_params(plain.values(), bucket_size_mb=64, op="mean")
    return gradients | {name: shard_like(gradient, parameters[name]) for name, gradient in plain.items()}


def check_weights(model: nn.Module, iteration: int) -> None:
    """Check that all weights are finite. The loss would reveal a non-finite weight only one step later.

    Raises:
        NonFiniteLossError: a weight is NaN or infinite.
    """
    named = [(n, p.detach()) for n, p in model.named_parameters() if p.requires_grad]
    if not named:
        return
    flags = torch.stack([local(p).isfinite().all() for _, p in named])
    if any(is_sharded(p) for _, p in named):  # all ranks must reach the same result
        whole_flags = flags.float()
        all_reduce(whole_flags, "min")
        flags = whole_flags > 0
    finite = flags.tolist()
    if not all(finite):
        name = named[finite.index(False)][0]
        raise NonFiniteLossError(
            f"the weight '{name}' is NaN or infinite at iteration {iteration}. No checkpoint is written; "
            "earlier checkpoints are kept. Lower the learning rate, add a warm-up, or clip the gradients "
            "(clip_grad=dict(max_norm=1.0))"
        )


def _required(checkpoint: Mapping[str, Any], key: str) -> Any:
    if key not in checkpoint:
        raise CheckpointError(
            f"the checkpoint has no '{key}', so it was probably saved with save_{key.removesuffix('s')}=False. "
            "Use load_from to start from its weights"
        )
    return checkpoint[key]
