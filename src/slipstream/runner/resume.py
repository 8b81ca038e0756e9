"""Create checkpoints of a run and resume from them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from slipstream.checkpoint import (
    find_latest_checkpoint,
    get_random_state,
    load_checkpoint,
    load_weights,
    read_meta,
    revise,
    set_random_state,
)
from slipstream.dist import (
    all_gather_object,
    all_reduce,
    all_reduce_params,
    broadcast,
    broadcast_object_list,
    get_rank,
    get_world_size,
    is_main_process,
)
from slipstream.dist.sharding import is_sharded, local, mesh_of, shard_like
from slipstream.errors import CheckpointError, NonFiniteLossError
from slipstream.model import unwrap_model
from slipstream.model.sync_batchnorm import average_batchnorm
from slipstream.model.wrappers import (
    comm_hook_state,
    load_comm_hook_state,
    unsharded_gradients,
    whole_weights,
)
from slipstream.version import __version__

if TYPE_CHECKING:
    from slipstream.runner.runner import Runner

__all__ = [
    "find_resume",
    "init_weights",
    "load_model_weights",
    "make_checkpoint",
    "read_checkpoint",
    "restore_random_state",
    "restore_training",
]


def find_resume(
    resume: bool | str | Path, load_from: str | Path | None, work_dir: str
) -> tuple[Path | None, int | None]:
    """Return the checkpoint to resume from and the seed of the run that wrote it, or (None, None).

    Rank 0 searches for the checkpoint and broadcasts the result, because a work_dir may be local to its machine.

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
            broadcast(tensor.detach())  # the wrapper broadcast the weights before this initialisation


def make_checkpoint(
    runner: Runner,
    by_epoch: bool | None,
    save_optimizer: bool,
    save_param_scheduler: bool,
    meta: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the run's state in MMEngine's checkpoint layout.

    Args:
        runner: the Runner.
        by_epoch: True at the end of an epoch that is not yet counted, False after a step that is not yet
            counted, None if the counters are up to date.
        save_optimizer, save_param_scheduler: whether to include their state.
        meta: additional entries of `meta`.

    Raises:
        NonFiniteLossError: a weight is NaN or infinite.
    """
    _check_weights(runner)
    if runner.is_training:
        average_batchnorm(runner.model)
    checkpoint: dict[str, Any] = {
        "meta": {**_meta(runner, by_epoch), **(meta or {})},
        "state_dict": unwrap_model(runner.model).state_dict(),
        "message_hub": runner.message_hub.state_dict(),
    }
    if save_optimizer and runner.optim_wrapper is not None:
        checkpoint["optimizer"] = runner.optim_wrapper.state_dict()
        if gradients := _pending_gradients(runner):
            checkpoint["gradients"] = gradients
        if remembered := comm_hook_state(runner.model):
            checkpoint["comm_hook"] = remembered
    if save_param_scheduler and runner.param_schedulers is not None:
        schedulers = runner.param_schedulers
        if isinstance(schedulers, dict):
            state: Any = {name: [s.state_dict() for s in part] for name, part in schedulers.items()}
        else:
            state = [s.state_dict() for s in schedulers]
        checkpoint["param_schedulers"] = state
    return checkpoint


def _meta(runner: Runner, by_epoch: bool | None) -> dict[str, Any]:
    epoch, done = runner.epoch, runner.inner_iter
    if by_epoch and runner.by_epoch:
        epoch, done = epoch + 1, 0
    dataset = getattr(runner.train_dataloader, "dataset", None) if runner.is_training else None
    return {
        "epoch": epoch,
        "iter": runner.iter + (1 if by_epoch is False else 0),
        "inner_samples": done * runner.samples_per_step,
        "samples_per_step": runner.samples_per_step,
        # The checkpoint at the end of an epoch or step is written before its validation.
        "validated": by_epoch is not runner.by_epoch,
        "seed": runner.seed,
        "random_state": all_gather_object(get_random_state()),
        "experiment_name": runner.experiment_name,
        "time": time.strftime("%Y%m%d_%H%M%S"),
        "slipstream_version": __version__,
        "cfg": runner.cfg_text,
        "dataset_meta": getattr(dataset, "metainfo", None),
    }


def read_checkpoint(
    model: nn.Module,
    path: str | Path,
    map_location: str | torch.device,
    revise_keys: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    """Read a checkpoint; rename and shard the weights in `state_dict` like those of the unwrapped model."""
    checkpoint = load_checkpoint(path, map_location, mesh_of(model))
    checkpoint.setdefault("state_dict", {k: v for k, v in checkpoint.items() if isinstance(v, Tensor)})
    # Remove a wrapper's prefix, unless the model has a submodule of this name.
    parameters, prefix = dict(model.named_parameters()), "module."
    own = any(key.startswith(prefix) for key in model.state_dict())
    checkpoint["state_dict"] = revise(checkpoint["state_dict"], () if own else revise_keys)
    for part in ("state_dict", "ema_state_dict"):
        for key, value in checkpoint.get(part, {}).items():
            own_param = parameters.get(key, parameters.get(key.removeprefix(prefix)))
            checkpoint[part][key] = shard_like(value, own_param)
    return checkpoint


def load_model_weights(runner: Runner, checkpoint: Mapping[str, Any], strict: bool, source: str) -> None:
    """Load the checkpoint's weights into the model and log a warning for those that do not match."""
    state = checkpoint.get("state_dict", checkpoint)
    for line in load_weights(unwrap_model(runner.model), state, strict, source):
        runner.logger.warning(f"Loading {source}: {line}")


def restore_training(
    runner: Runner, checkpoint: Mapping[str, Any], optimizer: bool, schedulers: bool
) -> None:
    """Restore the loop, message hub, optimizer and schedulers from the checkpoint.

    Raises:
        CheckpointError: a required entry is missing, or the number of schedulers differs.
    """
    meta = checkpoint.get("meta", {})
    if "ema_state_dict" in checkpoint:  # an EMAHook would have removed the key
        runner.logger.warning(
            "The checkpoint contains averaged weights, but the Runner has no EMAHook: training continues from the "
            "averaged weights"
        )
    if "iter" not in meta:
        raise CheckpointError("the checkpoint only contains weights and cannot be resumed; use load_from")
    if checkpoint.get("message_hub"):
        runner.message_hub.load_state_dict(checkpoint["message_hub"])
    if optimizer and runner.optim_wrapper is not None:
        runner.optim_wrapper.load_state_dict(_required(checkpoint, "optimizer"))
        _restore_gradients(runner, checkpoint.get("gradients", {}))
        load_comm_hook_state(runner.model, checkpoint.get("comm_hook", {}))
    if schedulers and runner.param_schedulers:
        _restore_schedulers(runner, _required(checkpoint, "param_schedulers"))
    _restore_position(runner, meta)
    states = meta.get("random_state")
    if states and len(states) == get_world_size():
        runner.resumed_random_state = states[get_rank()]


def _restore_position(runner: Runner, meta: Mapping[str, Any]) -> None:
    """Set the loop's position; if the batch size or world size changed, keep the number of samples."""
    before = meta.get("samples_per_step", runner.samples_per_step)
    start = meta.get("inner_samples", 0) // runner.samples_per_step
    if runner.by_epoch:  # an incomplete last batch is counted as a full one
        start = min(start, runner.train_loop.epoch_length)
    iteration = meta["iter"]
    if before != runner.samples_per_step:
        iteration = (
            meta["epoch"] * runner.train_loop.epoch_length + start
            if runner.by_epoch
            else iteration * before // runner.samples_per_step
        )
        runner.logger.warning(
            f"The checkpoint was written with {before} samples per step; this run uses {runner.samples_per_step}. "
            f"Iteration {meta['iter']} becomes iteration {iteration}"
        )
    runner.train_loop.resume(meta["epoch"], iteration, start, meta.get("validated", True))
    runner.logger.info(f"Resumed at epoch {meta['epoch']}, iteration {iteration}")


def _restore_schedulers(runner: Runner, states: Any) -> None:
    schedulers = runner.param_schedulers
    pairs: list[tuple[list[Any], list[Any]]] = (
        [(part, states.get(name, [])) for name, part in schedulers.items()]
        if isinstance(schedulers, dict)
        else [(schedulers or [], states)]
    )
    for own, saved in pairs:
        if len(own) != len(saved):
            raise CheckpointError(
                f"the checkpoint has {len(saved)} parameter schedulers, but the configuration has {len(own)}; "
                "resume with the same param_scheduler, or start a new run with load_from"
            )
        for scheduler, state in zip(own, saved, strict=True):
            scheduler.load_state_dict(state)


def _pending_gradients(runner: Runner) -> dict[str, Tensor]:
    """Return the gradients of an unfinished accumulation window, averaged over all ranks."""
    model = unwrap_model(runner.model)
    parameters = dict(model.named_parameters())
    gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    gradients |= unsharded_gradients(model)
    # Sharded gradients are averaged already.
    plain = {name: gradient for name, gradient in gradients.items() if not is_sharded(gradient)}
    all_reduce_params(plain.values(), bucket_size_mb=64, op="mean")
    return gradients | {name: shard_like(gradient, parameters[name]) for name, gradient in plain.items()}


def _restore_gradients(runner: Runner, gradients: Mapping[str, Tensor]) -> None:
    parameters = dict(unwrap_model(runner.model).named_parameters())
    for name, gradient in gradients.items():
        parameters[name].grad = shard_like(gradient, parameters[name]).to(parameters[name].device)


def _check_weights(runner: Runner) -> None:
    """Raise an error for non-finite weights, which the loss reveals only one step later."""
    named = [(n, p.detach()) for n, p in unwrap_model(runner.model).named_parameters() if p.requires_grad]
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
            f"the weight '{name}' is NaN or infinite at iteration {runner.iter + 1}. No checkpoint is written; "
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


def restore_random_state(runner: Runner) -> None:
    """Restore the random state of the resumed checkpoint. Later calls have no effect."""
    if runner.resumed_random_state is not None:
        set_random_state(runner.resumed_random_state)
        runner.resumed_random_state = None
