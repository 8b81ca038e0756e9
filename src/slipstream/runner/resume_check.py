"""Check that a run can resume from a checkpoint, before any state of the run is changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from slipstream.checkpoint import (
    PENDING,
    RESUMED,
    check,
    check_like,
    check_optimizer,
    check_tensors,
    compare_weights,
    stored_config,
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
    "warn_of_settings",
]

_TRAINING_KEYS = (
    "model", "loss_fn", "data_preprocessor", "optim_wrapper", "param_scheduler", "auto_scale_lr", "train_dataloader",
    "speed",
)  # fmt: skip
"""Top-level keys of the configuration that determine what a step computes."""
_GROUP_ARGUMENTS = ("max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
"""Arguments of torch's schedulers that are stored in the parameter groups of the optimizer."""
_LOADING_KEYS = (
    *(
        f"train_dataloader.{name}"
        for name in ("num_workers", "persistent_workers", "prefetch_factor", "pin_memory", "timeout")
    ),
    "speed.prefetch", "speed.gc", "speed.expandable_segments",
)  # fmt: skip
"""Settings that do not affect the results."""
_MAX_LENGTH = 200
"""Maximum number of characters of a value in a message."""
_MAX_SETTINGS = 5
"""Maximum number of changed settings in a message."""
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
    meta = checkpoint.get("meta", {})
    if "iter" not in meta:
        raise CheckpointError(
            f"{source}: 'meta.iter' is missing. The checkpoint contains only weights, so training cannot resume "
            "from it; use load_from"
        )
    if "epoch" not in meta:
        raise CheckpointError(f"{source}: 'meta.epoch' is missing; use load_from to start from the weights")


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
    parameters = dict(core.named_parameters())
    compare_weights(core, checkpoint["state_dict"], strict=True, source=str(source))
    check_tensors(core.state_dict(), checkpoint["state_dict"], "state_dict", source, warn, shapes=False)
    if optim is not None:
        check(checkpoint, PENDING, source)
        # Before the first optimizer step, the optimizer has no state.
        has_stepped = "batches" not in checkpoint or checkpoint["batches"] != checkpoint.get("unfinished")
        _check_optim(optim, _required(checkpoint, "optimizer"), source, warn, has_stepped)
        rank_gradients = checkpoint.get("rank_gradients", ())
        for path, gradients in [
            ("gradients", checkpoint.get("gradients", {})),
            *(
                (f"rank_gradients[{rank}]", rank_gradient)
                for rank, rank_gradient in enumerate(rank_gradients)
            ),
        ]:
            for name in gradients:
                if name not in parameters:
                    raise CheckpointError(
                        f"{source}: '{path}.{name}' does not match any parameter of the model; resume with the "
                        "same model"
                    )
            check_tensors(parameters, gradients, path, source, warn, layouts=False)
        check_comm_hook_state(model, checkpoint.get("comm_hook", {}), source)
        iteration = checkpoint["meta"]["iter"]
        if iteration % optim.accumulative_counts and not {"gradients", "rank_gradients"} & checkpoint.keys():
            warn(
                f"{source} has no 'gradients', but iteration {iteration} is in the middle of an accumulation window, "
                "so the next optimizer step uses fewer batches"
            )
    if schedulers:
        saved = _required(checkpoint, "param_schedulers")
        _check_schedulers(schedulers, saved, "param_schedulers", source)
        _check_torch_schedules(schedulers, saved, source, warn)


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
            f"of the samples of {type(loader.dataset).__name__}, an iterable dataset, so some samples would be "
            "repeated and others skipped; use the same values, or resume from a checkpoint that was written at the "
            "end of an epoch"
        )


def warn_of_length(checkpoint: Mapping[str, Any], schedulers: Schedulers, loop: Any, warn: Warn) -> None:
    """Warn if the run's length has changed, and the values of a restored scheduler depend on this length.

    A scheduler computes each value from the current value, so the values differ from those of a run that had the new
    length from the beginning. After a completed schedule, the learning rate keeps its final value.
    """
    name, unit = ("max_epochs", "epochs") if loop.counts_epochs else ("max_iters", "iterations")
    saved = (checkpoint.get("message_hub") or {}).get("runtime_info", {}).get(name)
    changed = [
        s for s in all_schedulers(schedulers) if getattr(s, "ends_with_run", False) and s.last_step > 0
    ]
    if saved in (None, getattr(loop, name)) or not changed:
        return
    values = ", ".join(
        f"{type(s).__name__} continues at {s.param_name} {s.get_last_value()[0]:.4g}" for s in changed
    )
    warn(
        f"The checkpoint was written by a run of {saved} {unit}, but this run has {getattr(loop, name)}, and schedules "
        f"that end with the run do not start again: {values}. To train with a complete schedule, start a new run from "
        "these weights with load_from; to keep a schedule unchanged, set its end"
    )


def _check_torch_schedules(schedulers: Schedulers, saved: Any, source: Any, warn: Warn) -> None:
    """Warn if a torch scheduler was created with other arguments than in the run that wrote the checkpoint.

    torch's `load_state_dict` restores the old arguments.

    Raises:
        CheckpointError: `total_steps` has changed. With the old value, training would not end with the schedule.
    """
    if isinstance(schedulers, dict):
        for name, part in schedulers.items():
            _check_torch_schedules(part, saved.get(name, []), source, warn)
        return
    for scheduler, state in zip(schedulers or (), saved, strict=False):
        if isinstance(scheduler, TorchSchedulerAdapter):
            own = scheduler.state_dict()
            if isinstance(state.get("initial"), Mapping) and state["initial"]:
                _check_torch_schedule(own["initial"], state["initial"], source, warn)
            else:  # written by an earlier version
                now, before = (_total_steps(each["scheduler"]) for each in (own, state))
                _check_torch_schedule(now, before, source, warn)


def _total_steps(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key == "total_steps"}


def _check_torch_schedule(own: Mapping[str, Any], saved: Mapping[str, Any], source: Any, warn: Warn) -> None:
    parts = saved.get("parts", ())
    for part, state in zip(own.get("parts", ()), parts if isinstance(parts, list) else (), strict=False):
        if isinstance(state, Mapping):
            _check_torch_schedule(part, state, source, warn)
    kind = own.get("class", "The scheduler")
    if "class" in saved and saved["class"] != kind:
        warn(
            f"{kind} continues with the state of {saved['class']} in {source}, so its values differ from those of both "
            "schedules. Use the same class, or start a new run from these weights with load_from"
        )
        return
    changed = {
        name: f"{_shortened(repr(own.get(name)))} (before: {_shortened(repr(saved.get(name)))})"
        for name in {*own, *saved} - {"parts"}
        if name not in own or name not in saved or not _equal(own[name], saved[name])
    }
    if "total_steps" in own.keys() & saved.keys() & changed.keys():
        raise CheckpointError(
            f"{kind} was created with total_steps={changed['total_steps']}, but torch restores the schedule in "
            f"{source}. Create it with total_steps={saved['total_steps']} and train for that many steps, or start a "
            "new run from these weights with load_from"
        )
    if changed:
        values = ", ".join(f"{name.lstrip('_')}={text}" for name, text in sorted(changed.items()))
        warn(
            f"{kind} was created with other arguments than in the run that wrote {source}, and torch restores the old "
            f"schedule: {values}. To use the new arguments, start a new run from these weights with load_from"
        )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def warn_of_settings(meta: Mapping[str, Any], current: str, source: Any, warn: Warn) -> None:
    """Warn if settings of the training differ from those of the run that wrote the checkpoint.

    Args:
        meta: the `meta` entry of the checkpoint, which contains the configuration of that run.
        current: the configuration of this run, as text.
        source: name of the checkpoint in the message.
        warn: called with the message. There is none if one of the configurations cannot be represented as text.
    """
    saved, now = (dict(_settings(stored_config(content))) for content in (meta, {"cfg": current}))
    missing = object()
    changed = sorted(key for key in {*saved, *now} if saved.get(key, missing) != now.get(key, missing))
    if saved and now and changed:
        shown = [
            f"{key} is {_shortened(now.get(key, 'not set'))} (before: {_shortened(saved.get(key, 'not set'))})"
            for key in changed[:_MAX_SETTINGS]
        ]
        more = f", and {len(changed) - len(shown)} more" if len(changed) > len(shown) else ""
        warn(
            f"This run continues with other settings than the run that wrote {source}: {', '.join(shown)}{more}. If "
            "this is not intended, resume with the same configuration and overrides"
        )


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 3]}..."


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the dotted path and the `repr` of each setting that affects the results of training."""
    pending = [(key, config[key]) for key in _TRAINING_KEYS if key in config]
    while pending:
        path, value = pending.pop()
        if isinstance(value, Mapping):
            pending += [(f"{path}.{key}", item) for key, item in value.items()]
        elif path not in _LOADING_KEYS and (value is not None or path not in _TRAINING_KEYS):
            yield path, repr(value)  # NaN is equal to itself


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
        return
    state = saved["loss_scaler"]
    check_like(scaler.state_dict(), state, f"{path}.loss_scaler", source)
    for key, value in state.items():
        integer = isinstance(value, int) and 0 <= value < 2**31
        if key in ("growth_interval", "_growth_tracker") and not integer:
            raise CheckpointError(
                f"{source}: '{path}.loss_scaler.{key}' must be a non-negative integer below 2**31, not {value}"
            )
        if key in ("scale", "growth_factor", "backoff_factor", "growth_interval") and not 0 < value < float(
            "inf"
        ):
            raise CheckpointError(
                f"{source}: '{path}.loss_scaler.{key}' must be positive and finite, not {value}"
            )


def _check_schedulers(schedulers: Any, saved: Any, path: str, source: Any) -> None:
    if isinstance(schedulers, dict):
        if not isinstance(saved, Mapping):
            raise CheckpointError(
                f"{source}: '{path}' must be a dict with a list for each optimizer, not {type(saved).__name__}"
            )
        for name, part in schedulers.items():
            _check_schedulers(part, saved.get(name, []), f"{path}.{name}", source)
        return
    if not isinstance(saved, list | tuple):
        raise CheckpointError(f"{source}: '{path}' must be a list, not {type(saved).__name__}")
    if len(schedulers) != len(saved):
        raise CheckpointError(
            f"{source}: '{path}' has {len(saved)} parameter scheduler{'' if len(saved) == 1 else 's'}, but the "
            f"configuration has {len(schedulers)}; resume with the same param_scheduler, or start a new run with "
            "load_from"
        )
    for index, (scheduler, state) in enumerate(zip(schedulers, saved, strict=True)):
        # Exclude `attributes`, because different attributes may have changed at different steps, and `initial`, which
        # `_check_torch_schedules` compares.
        ignored = ("attributes", "initial")
        expected = {key: value for key, value in scheduler.state_dict().items() if key not in ignored}
        if isinstance(
            inner := expected.get("scheduler"), Mapping
        ):  # `_check_torch_schedules` compares the milestones
            expected["scheduler"] = {key: value for key, value in inner.items() if key != "milestones"}
        check_like(expected, state, f"{path}[{index}]", source)
        if hasattr(scheduler, "check_attributes"):
            try:
                scheduler.check_attributes(state)
            except CheckpointError as error:
                raise CheckpointError(f"{source}: '{path}[{index}]': {error}") from None


def _warn_about_missing(checkpoint: Mapping[str, Any], source: Any, warn: Warn) -> None:
    meta = checkpoint["meta"]
    missing = [f"meta.{key}" for key in _OPTIONAL_META if meta.get(key) is None]
    missing += [] if checkpoint.get("message_hub") else ["message_hub"]
    if missing:
        names = ", ".join(f"'{name}'" for name in missing)
        warn(f"{source} has no {names}, so the resumed run will differ from an uninterrupted run")
    states = meta.get("random_state")
    if states is not None and len(states) != get_world_size():
        warn(
            f"{source} was written by {len(states)} process{'' if len(states) == 1 else 'es'}, but this run has "
            f"{get_world_size()}, so random numbers will differ from those of an uninterrupted run"
        )


def _required(checkpoint: Mapping[str, Any], key: str) -> Any:
    if key not in checkpoint:
        raise CheckpointError(
            f"the checkpoint has no '{key}', so it was probably saved with save_{key.removesuffix('s')}=False. "
            "Use load_from to start from its weights"
        )
    return checkpoint[key]


def learning_rates(optim: OptimWrapper) -> list[dict[str, float]]:
    """Return, for each parameter group, the learning rate without the factor of a schedule, and `_GROUP_ARGUMENTS`."""
    wrappers = list(optim.values()) if isinstance(optim, OptimWrapperDict) else [optim]
    groups = [group for wrapper in wrappers for group in wrapper.param_groups]
    return [
        {
            "learning rate": float(group.get("initial_lr", group["lr"])),
            **{name: float(group[name]) for name in _GROUP_ARGUMENTS if isinstance(group.get(name), Real)},
        }
        for group in groups
    ]


def warn_of_learning_rates(
    configured: list[dict[str, float]], restored: list[dict[str, float]], warn: Warn
) -> None:
    """Warn if a resumed run continues with other values of `learning_rates` than those that are configured."""
    different: dict[str, tuple[float, float]] = {}
    for own, saved in zip(configured, restored, strict=True):
        for name in own.keys() & saved.keys():
            if not math.isclose(own[name], saved[name], rel_tol=1e-6):
                different.setdefault(name, (own[name], saved[name]))
    for name, (now, before) in sorted(different.items()):
        warn(
            f"The configured {name} {now:g} is not used: the resumed run continues with the checkpoint's "
            f"optimizer, whose {name} is {before:g}. To train with {now:g}, start a new run with load_from"
        )
