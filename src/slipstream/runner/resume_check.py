"""Check that a run can resume from a checkpoint, before any state of the run is changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.utils.data import IterableDataset

from slipstream.checkpoint import (
    PENDING,
    RESUMED,
    check,
    check_like,
    check_optimizer,
    check_tensors,
    compare_weights,
)
from slipstream.dist import get_world_size
from slipstream.errors import CheckpointError
from slipstream.model import unwrap_model
from slipstream.model.wrappers import check_comm_hook_state
from slipstream.optim import OptimWrapper, OptimWrapperDict
from slipstream.optim.scheduler import TorchSchedulerAdapter, all_schedulers

__all__ = [
    "check_content",
    "check_matches",
    "check_stream",
    "learning_rates",
    "warn_of_learning_rates",
    "warn_of_length",
]

Warn = Callable[[str], None]
Schedulers = list[Any] | dict[str, list[Any]] | None

_OPTIONAL_META = ("seed", "inner_samples", "samples_per_step", "validated", "random_state")
"""Optional entries of `meta`. Without them, a resumed run differs from an uninterrupted run."""


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
) -> None:
    """Check that the checkpoint matches the model, the optimizer and the schedulers.

    Args:
        checkpoint: a checkpoint that has passed `check_content` and the checks of the hooks.
        source: name of the checkpoint in messages.
        model: the wrapped model.
        optim: the optimizer wrapper to restore; None if the optimizer state is not restored.
        schedulers: the schedulers to restore; None if their states are not restored.
        warn: called with a message about each difference that does not prevent resuming.

    Raises:
        CheckpointError: an entry is missing, or belongs to a different model, optimizer or schedule.
    """
    _warn_about_missing(checkpoint, source, warn)
    core = unwrap_model(model)
    compare_weights(core, checkpoint["state_dict"], strict=True, source=str(source))
    check_tensors(core.state_dict(), checkpoint["state_dict"], "state_dict", source, warn, shapes=False)
    if optim is not None:
        check(checkpoint, PENDING, source)
        # Before the first optimizer step, the optimizer has no state.
        has_stepped = "batches" not in checkpoint or checkpoint["batches"] != checkpoint.get("unfinished")
        _check_optim(optim, _required(checkpoint, "optimizer"), source, warn, has_stepped)
        _check_gradients(dict(core.named_parameters()), checkpoint, source, warn)
        check_comm_hook_state(model, checkpoint.get("comm_hook", {}), source)
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
    states = meta.get("random_state")
    if states is not None and len(states) != get_world_size():
        warn(
            f"{source} was written by {len(states)} processes, but this run has {get_world_size()}, so random numbers "
            "will differ from those of an uninterrupted run"
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
    has_stepped: bool,
    path: str = "optimizer",
) -> None:
    if isinstance(optim, OptimWrapperDict):
        if set(saved) != set(optim.keys()):
            raise CheckpointError(
                f"{source}: '{path}' contains {sorted(map(str, saved))}, but the optimizers are "
                f"{sorted(optim.keys())}; resume with the same optimizers, or start a new run with load_from"
            )
        for name, wrapper in optim.items():
            _check_optim(wrapper, saved[name], source, warn, has_stepped, f"{path}.{name}")
        return
    check_optimizer(optim.optimizer, saved, path, source, warn if has_stepped else None)
    if (scaler := getattr(optim, "loss_scaler", None)) is None:
        return
    if saved.get("loss_scaler") in (None, {}):
        warn(f"{source} has no '{path}.loss_scaler', so the loss scale starts at its initial value")
    else:
        check_like(scaler.state_dict(), saved["loss_scaler"], f"{path}.loss_scaler", source)


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
    kind = dict if isinstance(schedulers, dict) else list
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
        expected = {k: v for k, v in scheduler.state_dict().items() if k not in ("attributes", "initial")}
        if isinstance(inner := expected.get("scheduler"), Mapping):
            expected["scheduler"] = {k: v for k, v in inner.items() if k != "milestones"}
        check_like(expected, state, f"{path}[{index}]", source)
        if hasattr(scheduler, "check_attributes"):
            try:
                scheduler.check_attributes(state)
            except CheckpointError as error:
                raise CheckpointError(f"{source}: '{path}[{index}]': {error}") from None


def check_stream(meta: Mapping[str, Any], loop: Any, source: Any) -> None:
    """Check that a training loop over an iterable dataset can continue in the middle of an epoch.

    Several workers yield their batches in turn, so the samples in the finished batches depend on the number of workers,
    the batch size, and the number of processes.

    Raises:
        CheckpointError: the order of the samples has changed.
    """
    loader = loop.dataloader
    if not isinstance(loader.dataset, IterableDataset) or not meta.get("inner_samples"):
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
        type(getattr(s, "scheduler", s)).__name__
        for s in all_schedulers(schedulers)
        if isinstance(s, TorchSchedulerAdapter) or (getattr(s, "ends_with_run", False) and s.last_step > 0)
    ]
    if saved not in (None, now) and changed:
        warn(
            f"The checkpoint was written by a run of {saved} {unit}, but this run has {now}. The saved schedules "
            f"({', '.join(changed)}) continue and do not start again; for a complete schedule, start a new run from "
            "these weights with load_from"
        )


def learning_rates(optim: OptimWrapper) -> list[float]:
    """Return the learning rate of each parameter group, without the factor of a schedule."""
    wrappers = list(optim.values()) if isinstance(optim, OptimWrapperDict) else [optim]
    groups = [group for wrapper in wrappers for group in wrapper.param_groups]
    return [float(group.get("initial_lr", group["lr"])) for group in groups]


def warn_of_learning_rates(configured: list[float], restored: list[float], warn: Warn) -> None:
    """Warn if a resumed run continues with another learning rate than the configured one."""
    for now, before in zip(configured, restored, strict=True):
        if not math.isclose(now, before, rel_tol=1e-6):
            warn(
                f"The configured learning rate {now:g} is not used: the resumed run continues with the checkpoint's "
                f"optimizer, whose learning rate is {before:g}. To train with {now:g}, start a new run with load_from"
            )
            return
