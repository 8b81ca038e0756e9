"""Find the checkpoint to resume from; check, save and restore weights, optimizer state and schedulers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from slipstream.checkpoint import (
    META,
    PENDING,
    RESUMED,
    check,
    check_like,
    check_optimizer,
    check_tensors,
    compare_weights,
    load_checkpoint,
    newest_checkpoints,
    read_meta,
    revise,
    verify_checkpoint,
    weights_in,
)
from slipstream.dataset.loading.loader import is_iterable, order_of
from slipstream.dist import (
    all_gather_object,
    all_reduce,
    all_reduce_params,
    broadcast,
    broadcast_object_list,
    gather_named_tensors,
    get_rank,
    get_world_size,
    is_main_process,
    own_or_mean,
)
from slipstream.errors import CheckpointError, NonFiniteLossError
from slipstream.model import unwrap_model
from slipstream.model.weight_init import check_initialized, load_pretrained, needs_pretrained
from slipstream.model.wrappers import (
    full_weights,
    unsharded_gradients,
)
from slipstream.optim import OptimWrapper, OptimWrapperDict
from slipstream.optim.scheduler import TorchSchedulerAdapter, all_schedulers
from slipstream.sharding import is_sharded, local_shard, mesh_of, shard_like

# (pattern, replacement) pairs that remove the prefixes of DDP and `torch.compile` from weight names.
STRIP_WRAPPER = ((r"^((module|_orig_mod)\.)+", ""),)
# Optional entries of `meta`. Without them, a resumed run differs from an uninterrupted run.
_OPTIONAL_META = ("seed", "inner_samples", "samples_per_step", "validated", "random_state")

Warn = Callable[[str], None]
Schedulers = list[Any] | dict[str, list[Any]] | None


def find_resume(
    resume: bool | str | Path, load_from: str | Path | None, work_dir: str
) -> tuple[Path | None, int | None, list[str]]:
    """Return the checkpoint to resume from, its seed, and warnings; (None, None, warnings) for a new run.

    With `resume=True`, the newest undamaged checkpoint in the work_dir is used, so that a restarted run resumes. If
    there is none, and `load_from` contains a training position, it is used as in MMEngine. Rank 0 searches for
    checkpoints and broadcasts the result, because the work_dir may exist only on the machine of rank 0.

    Raises:
        CheckpointError: none of the checkpoints can be read, or a rank cannot access the checkpoint.
    """
    use_latest = resume is True
    lines: list[str] = []
    if use_latest:
        paths = _newest(work_dir, lines)
    else:
        paths = iter([Path(str(resume))] if resume else [])
    problems: list[CheckpointError] = []
    for path in paths:
        position, problem = _check_intact(path)
        if problem is not None:
            problems.append(problem)
        elif not use_latest or "iter" in position:
            lines += map(str, problems)
            if lines:
                step = position["iter"]
                lines.append(f"Resuming from {path}; all steps after iteration {step} will be repeated")
            if use_latest and load_from and Path(str(load_from)).absolute() != path.absolute():
                lines.append(f"Resuming from {path}, so load_from={str(load_from)!r} is not read")
            return path, position.get("seed"), lines
    if problems:
        raise problems[0]
    if use_latest and load_from:
        position, problem = _check_intact(path := Path(str(load_from)))
        if problem is None and "iter" in position:
            return path, position.get("seed"), lines
    return None, None, lines


def _newest(work_dir: str, lines: list[str]) -> Iterator[Path]:
    """Yield the checkpoints that rank 0 finds in its work_dir, in the order of `newest_checkpoints`.

    Messages from `newest_checkpoints` are stored in `lines`.
    """
    found: list[str] = []
    paths = newest_checkpoints(work_dir, found.append) if is_main_process() else iter(())
    while True:
        result: list[Any] = [None, None, found]
        try:
            result[0] = next(paths, None)
        except CheckpointError as error:
            result[1] = error
        broadcast_object_list(result)
        path, problem, lines[:] = result
        if problem is not None:
            raise problem
        if path is None:
            return
        yield path


def _check_intact(path: Path) -> tuple[dict[str, Any], CheckpointError | None]:
    """Return the checkpoint's `meta`, and the error of a rank that cannot read the checkpoint.

    The error is None if all ranks can read the checkpoint. All ranks return the same values.
    """
    result: list[Any] = [{}, None]
    try:
        if not path.exists() and not is_main_process():
            raise CheckpointError(
                f"rank {get_rank()} cannot access {path}; put the work_dir on a shared file system"
            )
        if is_main_process():
            result[0] = read_meta(path)
            check(result[0], META, path, "meta")
        verify_checkpoint(path, get_rank(), get_world_size())
    except CheckpointError as error:
        result[1] = error
    broadcast_object_list(meta := result[:1])
    problems = [problem for problem in all_gather_object(result[1]) if problem is not None]
    return meta[0], problems[0] if problems else None


def init_weights(model: nn.Module, call_method: bool = True) -> None:
    """Initialize the unwrapped model, load pretrained weights, and broadcast rank 0's weights.

    Args:
        model: the unwrapped model.
        call_method: whether to call the model's `init_weights` method, if it has one.

    Raises:
        ModelError: the model contains a lazy module that has not been initialized.
    """
    call_method = call_method and hasattr(model, "init_weights")
    if not call_method and not needs_pretrained(model):
        check_initialized(model)
        return
    with full_weights(model):
        if call_method:
            model.init_weights()  # type: ignore[operator]
        check_initialized(model)
        load_pretrained(model)
        # Broadcast again, because the wrapper broadcast the weights before they were initialized.
        for tensor in chain(model.parameters(), model.buffers()):
            broadcast(tensor.detach())


def read_checkpoint(
    model: nn.Module,
    path: str | Path,
    map_location: str | torch.device,
    revise_keys: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    """Read a checkpoint for the unwrapped `model`, rename its weights, and shard them like the model's parameters.

    The entry `state_dict` contains the weights that `weights_in` selects.
    """
    checkpoint = load_checkpoint(path, map_location, mesh_of(model))
    state = weights_in(checkpoint, path)
    # Remove a wrapper's prefix, unless the model has a submodule with the same name.
    parameters, prefix = dict(model.named_parameters()), "module."
    has_prefix = any(key.startswith(prefix) for key in model.state_dict())
    checkpoint["state_dict"] = revise(
        state, () if has_prefix and revise_keys is STRIP_WRAPPER else revise_keys
    )
    for part in ("state_dict", "ema_state_dict"):
        saved = checkpoint.get(part)
        if not isinstance(saved, dict):
            continue
        for key, value in saved.items():
            own_param = parameters.get(key, parameters.get(str(key).removeprefix(prefix)))
            saved[key] = shard_like(value, own_param)
    return checkpoint


def optimizer_state(model: nn.Module, optim: OptimWrapper) -> dict[str, Any]:
    """Return the checkpoint entries for the optimizer and the pending gradients."""
    wrappers = _wrappers(optim)
    for wrapper in wrappers.values():
        if (
            wrapper.objects is not None
        ):  # only the sum over the ranks matters, and rank 0 writes the checkpoint
            all_reduce(wrapper.objects[:1], "mean")
    state = {
        "optimizer": optim.state_dict(),
        "batches": {name: wrapper.batches for name, wrapper in wrappers.items()},
        "unfinished": {name: wrapper.accumulation.unfinished for name, wrapper in wrappers.items()},
        "windows": {name: wrapper.accumulation.size for name, wrapper in wrappers.items()},
    }
    return state | _pending_gradients(unwrap_model(model))


def restore_counts(optim: OptimWrapper, saved: Mapping[str, Mapping[str, int]], iteration: int) -> None:
    """Restore the number of batches that each wrapper has counted, which determines where its accumulation windows end.

    With a single wrapper, the saved count normally equals the iteration number. In that case, the count that
    `initialize_count_status` has set is kept, because it follows from the iteration number of this run, which has been
    adjusted to the batch size. The saved count differs from the iteration number if `train_step` updates the weights
    several times per batch.

    Args:
        optim: the optimizer wrapper, after `initialize_count_status`.
        saved: the entries `batches`, `unfinished` and `windows` of the checkpoint.
        iteration: the iteration number in the checkpoint.
    """
    counts, unfinished, windows = (saved.get(key, {}) for key in ("batches", "unfinished", "windows"))
    for name, wrapper in _wrappers(optim).items():
        count = counts.get(name)
        if count is not None and (name or count != iteration):
            wrapper.batches = count
        ratio = wrapper.batches / count if count else 1.0
        wrapper.resume_window(unfinished.get(name, wrapper.accumulation.unfinished), windows.get(name), ratio)


def _wrappers(optim: OptimWrapper) -> dict[str, OptimWrapper]:
    return dict(optim.items()) if isinstance(optim, OptimWrapperDict) else {"": optim}


def restore_optimizer(model: nn.Module, optim: OptimWrapper, checkpoint: Mapping[str, Any]) -> None:
    """Restore the entries returned by `optimizer_state`."""
    optim.load_state_dict(checkpoint["optimizer"])
    parameters = dict(unwrap_model(model).named_parameters())
    rank_gradients = own_or_mean(checkpoint.get("rank_gradients", ()), get_rank(), get_world_size())
    for name, gradient in {**rank_gradients, **checkpoint.get("gradients", {})}.items():
        parameters[name].grad = _match_layout(parameters[name], shard_like(gradient, parameters[name]))


def _match_layout(param: nn.Parameter, gradient: Tensor) -> Tensor:
    """Return the gradient with the parameter's device, dtype and strides, which DDP and compiled graphs require."""
    if gradient.layout is not torch.strided or is_sharded(param):
        return gradient.to(param)
    return torch.empty_like(param, requires_grad=False).copy_(gradient)


def sampler_states(loop: Any, loader: Any, position: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the loader, or of its sampler, to save in a checkpoint."""
    if (order := order_of(loader)) is not None:
        return order.state_dict()
    state = None if loader is None else loop.loader_state.get(position["inner_samples"] > 0)
    return {} if state is None else {"loader": state}


def restore_samplers(loop: Any, meta: Mapping[str, Any]) -> None:
    """Restore the state of the loader, or of its sampler.

    The checkpoint contains the states that `sampler_states` returned on each rank. If the number of processes has
    changed, all processes use the states of rank 0, except the states of loaders.
    """
    states, order = meta.get("sampler_generators") or [], order_of(loop.dataloader)
    same = len(states) == get_world_size()
    if states and order is not None:
        order.load_state_dict(states[get_rank() if same else 0])
    elif states and "loader" in states[0]:
        if not same:
            raise CheckpointError(
                f"it contains the positions of the data loaders of {len(states)} processes, but this run has "
                f"{get_world_size()}; use the same number of processes, or start a new run with load_from"
            )
        loop.loader_state.restore(states[get_rank()]["loader"])


def scheduler_states(schedulers: list[Any] | dict[str, list[Any]]) -> Any:
    """Return the states of the schedulers."""
    if isinstance(schedulers, dict):
        return {name: scheduler_states(part) for name, part in schedulers.items()}
    return [scheduler.state_dict() for scheduler in schedulers]


def restore_schedulers(schedulers: list[Any] | dict[str, list[Any]], checkpoint: Mapping[str, Any]) -> None:
    """Restore the schedulers from a checkpoint."""
    states = checkpoint["param_schedulers"]
    if isinstance(schedulers, dict):
        for name, part in schedulers.items():
            restore_schedulers(part, {"param_schedulers": states.get(name, [])})
        return
    for scheduler, state in zip(schedulers, states, strict=True):
        scheduler.load_state_dict(state)


def _pending_gradients(model: nn.Module) -> dict[str, Any]:
    """Return the checkpoint entries for the gradients of an unfinished accumulation window, or {} if there are none.

    On rank 0, `rank_gradients` contains the gradients of every rank. For a sharded model, `gradients` contains the
    gradients averaged over all ranks.
    """
    parameters = dict(model.named_parameters())
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    sharded = {name: gradient.clone() for name, gradient in gradients.items() if is_sharded(gradient)}
    unsharded = unsharded_gradients(model)
    all_reduce_params(unsharded.values(), bucket_size_mb=64, op="mean")
    sharded |= {name: shard_like(gradient, parameters[name]) for name, gradient in unsharded.items()}
    rank_gradients = gather_named_tensors(
        {name: gradient for name, gradient in gradients.items() if name not in sharded}
    )
    return {"gradients": sharded, "rank_gradients": rank_gradients} if sharded or any(rank_gradients) else {}


def check_weights(model: nn.Module, checkpoint: Mapping[str, Any], iteration: int) -> None:
    """Check that all trainable weights, their averages, and the running statistics of normalization layers are finite.

    A non-finite weight makes the loss non-finite one step later. Non-finite running statistics do not affect the
    training loss, but they affect validation, and they remain NaN or infinite in all later steps.

    Args:
        model: the model, unwrapped.
        checkpoint: the checkpoint to be saved, which may contain averages of the weights and the statistics.
        iteration: number of completed steps.

    Raises:
        NonFiniteLossError: a weight, its average, or a running statistic is NaN or infinite.
    """
    named = {name: ("weight", p.detach()) for name, p in model.named_parameters() if p.requires_grad}
    named |= {
        f"{name}.{key}": ("running statistic", statistic)
        for name, module in model.named_modules()
        for key in ("running_mean", "running_var")
        if isinstance(module, _NormBase) and (statistic := getattr(module, key)) is not None
    }
    average = checkpoint["state_dict"] if "ema_state_dict" in checkpoint else {}
    tensors = [(f"{kind} '{name}'", tensor) for name, (kind, tensor) in named.items()]
    tensors += [
        (f"average of the {kind} '{name}'", average[name])
        for name, (kind, _) in named.items()
        if name in average
    ]
    if not tensors:
        return
    flags = torch.stack([local_shard(tensor).isfinite().all() for _, tensor in tensors])
    if any(is_sharded(tensor) for _, tensor in tensors):  # all ranks must obtain the same result
        all_reduce(flags := flags.float(), "min")
    finite = flags.tolist()
    if not all(finite):
        name = tensors[finite.index(False)][0]
        raise NonFiniteLossError(
            f"the {name} is NaN or infinite at iteration {iteration}. No checkpoint was written; earlier checkpoints "
            "were kept. Lower the learning rate, add a warm-up, or clip the gradients "
            "(clip_grad=dict(max_norm=1.0))",
            iteration,
        )


# ---- checks before a resume -----------------------------------------------------------------------------


def check_content(checkpoint: Mapping[str, Any], source: Any) -> None:
    """Check the types and ranges of the entries, and that the checkpoint contains a training position.

    Raises:
        CheckpointError: an entry is missing or invalid; the message names the entry's key.
    """
    check(checkpoint, RESUMED, source)
    for key in ("iter", "epoch"):
        if key not in checkpoint.get("meta", {}):
            raise CheckpointError(
                f"{source}: 'meta.{key}' is missing, so training cannot resume from this checkpoint; use load_from to "
                "start from its weights"
            )


def check_matches(
    checkpoint: Mapping[str, Any],
    source: Any,
    model: nn.Module,
    optim: OptimWrapper | None,
    schedulers: Schedulers,
    warn: Warn,
    compare_rates: bool = True,
) -> None:
    """Check that the checkpoint matches the model, the optimizer and the schedulers.

    Args:
        checkpoint: a checkpoint that has passed `check_content` and the checks of the hooks.
        source: name of the checkpoint in messages.
        model: the wrapped model.
        optim: the optimizer wrapper to restore; None if the optimizer state is not restored.
        schedulers: the schedulers to restore; None if their states are not restored.
        warn: called with a message about each difference that does not prevent resuming.
        compare_rates: whether to warn of a configured learning rate that the resumed run does not use.

    Raises:
        CheckpointError: an entry is missing, or belongs to a different model, optimizer or schedule.
    """
    _warn_about_missing(checkpoint, source, warn)
    core = unwrap_model(model)
    compare_weights(core, checkpoint["state_dict"], strict=True, source=str(source))
    check_tensors(core.state_dict(), checkpoint["state_dict"], "state_dict", source, warn, shapes=False)
    if optim is not None:
        check(checkpoint, PENDING, source)
        _check_optim(optim, _required(checkpoint, "optimizer"), source, warn)
        for name, wrapper in _wrappers(optim).items() if compare_rates else ():
            saved = checkpoint["optimizer"][name] if name else checkpoint["optimizer"]
            _compare_learning_rates(wrapper.param_groups, saved["param_groups"], warn)
        _check_gradients(dict(core.named_parameters()), checkpoint, source, warn)
    if schedulers:
        _check_schedulers(schedulers, _required(checkpoint, "param_schedulers"), "param_schedulers", source)


def _warn_about_missing(checkpoint: Mapping[str, Any], source: Any, warn: Warn) -> None:
    meta = checkpoint["meta"]
    missing = [f"'meta.{key}'" for key in _OPTIONAL_META if meta.get(key) is None]
    missing += [] if checkpoint.get("message_hub") else ["'message_hub'"]
    if missing:
        warn(
            f"{source} has no {', '.join(missing)}, so the resumed run will differ from an uninterrupted run"
        )


def _required(checkpoint: Mapping[str, Any], key: str) -> Any:
    if key not in checkpoint:
        raise CheckpointError(
            f"the checkpoint has no '{key}', so it was probably saved with save_{key.removesuffix('s')}=False. "
            "Use load_from to start from its weights"
        )
    return checkpoint[key]


def _check_optim(
    optim: OptimWrapper,
    saved: Mapping[str, Any],
    source: Any,
    warn: Warn,
    path: str = "optimizer",
) -> None:
    if isinstance(optim, OptimWrapperDict):
        if set(saved) != set(optim.keys()):
            raise CheckpointError(
                f"{source}: '{path}' contains {sorted(map(str, saved))}, but the optimizers are "
                f"{sorted(optim.keys())}; resume with the same optimizers, or start a new run with load_from"
            )
        for name, wrapper in optim.items():
            _check_optim(wrapper, saved[name], source, warn, f"{path}.{name}")
        return
    check_optimizer(optim.optimizer, saved, path, source)
    if (scaler := getattr(optim, "loss_scaler", None)) is None:
        return
    if saved.get("loss_scaler") in (None, {}):
        warn(f"{source} has no '{path}.loss_scaler', so the loss scale starts at its initial value")
    else:
        check_like(scaler.state_dict(), saved["loss_scaler"], f"{path}.loss_scaler", source)


def _compare_learning_rates(
    groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]], warn: Warn
) -> None:
    for group, other in zip(groups, saved, strict=True):
        now, before = (float(each.get("initial_lr", each["lr"])) for each in (group, other))
        if not math.isclose(now, before, rel_tol=1e-6):
            warn(
                f"The configured learning rate {now:g} is not used: the resumed run continues with the checkpoint's "
                f"optimizer, whose learning rate is {before:g}. To train with {now:g}, start a new run with load_from"
            )
            return


def _check_gradients(
    parameters: Mapping[str, nn.Parameter], checkpoint: Mapping[str, Any], source: Any, warn: Warn
) -> None:
    pending = {"gradients": checkpoint.get("gradients", {})}
    pending |= {f"rank_gradients[{i}]": part for i, part in enumerate(checkpoint.get("rank_gradients", ()))}
    for path, gradients in pending.items():
        if unknown := sorted(gradients.keys() - parameters.keys()):
            raise CheckpointError(
                f"{source}: '{path}.{unknown[0]}' does not match any parameter of the model; resume with the same model"
            )
        check_tensors(parameters, gradients, path, source, warn, layouts=False)


def _check_schedulers(schedulers: Any, saved: Any, path: str, source: Any) -> None:
    kind: Any = dict if isinstance(schedulers, dict) else list
    if not isinstance(saved, kind):
        raise CheckpointError(f"{source}: '{path}' must be a {kind.__name__}, not {type(saved).__name__}")
    if isinstance(schedulers, dict):
        for name, part in schedulers.items():
            _check_schedulers(part, saved.get(name, []), f"{path}.{name}", source)
        return
    if len(schedulers) != len(saved):
        raise CheckpointError(
            f"{source}: '{path}' contains {len(saved)} parameter schedulers, but the configuration has "
            f"{len(schedulers)}; resume with the same param_scheduler, or start a new run with load_from"
        )
    for index, (scheduler, state) in enumerate(zip(schedulers, saved, strict=True)):
        # The saved attributes are those that had changed, so they may differ. torch restores its schedulers' arguments.
        expected = {k: v for k, v in scheduler.state_dict().items() if k != "attributes"}
        if isinstance(inner := expected.get("scheduler"), Mapping):
            expected["scheduler"] = {k: v for k, v in inner.items() if k != "milestones"}
        check_like(expected, state, f"{path}[{index}]", source)


def check_stream(meta: Mapping[str, Any], loop: Any, source: Any) -> None:
    """Check that a training loop over an iterable dataset can continue in the middle of an epoch.

    Several workers yield their batches in turn, so the samples in the finished batches depend on the number of workers,
    the batch size, and the number of processes.

    Raises:
        CheckpointError: the order of the samples has changed.
    """
    loader = loop.dataloader
    if not is_iterable(loader) or not meta.get("inner_samples"):
        return
    names = ("train_dataloader.num_workers", "samples per step", "processes")
    now = loader.num_workers, loop.samples_per_step, get_world_size()
    states = meta.get("random_state") or range(get_world_size())  # one for each process
    saved = meta.get("num_workers", now[0]), meta.get("samples_per_step", now[1]), len(states)
    changes = [f"{name}={a} (now {b})" for name, a, b in zip(names, saved, now, strict=True) if a != b]
    if changes and max(saved[0], now[0]) > 1:
        raise CheckpointError(
            f"{source} was written in the middle of an epoch with {', '.join(changes)}. The change affects the order "
            "of the samples of an iterable dataset, so some samples would be repeated and others skipped; use the same "
            "values, or resume from a checkpoint that was written at the end of an epoch"
        )


def warn_of_length(checkpoint: Mapping[str, Any], schedulers: Schedulers, loop: Any, warn: Warn) -> None:
    """Warn if the run's length has changed and a restored schedule depends on it: it continues as it was saved."""
    name, unit = ("max_epochs", "epochs") if loop.counts_epochs else ("max_iters", "iterations")
    saved, now = (checkpoint.get("message_hub") or {}).get("runtime_info", {}).get(name), getattr(loop, name)
    changed = [
        s for s in all_schedulers(schedulers) if getattr(s, "ends_with_run", False) and s.last_step > 0
    ]
    changed += [s.scheduler for s in all_schedulers(schedulers) if isinstance(s, TorchSchedulerAdapter)]
    if saved not in (None, now) and changed:
        warn(
            f"The checkpoint was written by a run of {saved} {unit}, but this run has {now}. The saved schedules "
            f"({', '.join(type(s).__name__ for s in changed)}) continue and do not start again; for a complete "
            "schedule, start a new run from these weights with load_from"
        )
