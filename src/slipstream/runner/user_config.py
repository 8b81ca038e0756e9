"""Check the Runner's arguments, add default values, and add config paths to errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from slipstream.config import options
from slipstream.dataset.loading.loader import length, limit_batches
from slipstream.errors import ConfigError, did_you_mean
from slipstream.hooks import MonitorCheckHook
from slipstream.speed import SpeedPlan
from slipstream.typecheck import NonNegativeInt, PositiveInt, PositiveIntOrFraction, check, is_number

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from slipstream.optim import OptimWrapper

    # Type of the Runner's `train_dataloader`, `val_dataloader` and `test_dataloader` arguments.
    LoaderArgument = DataLoader[Any] | Mapping[str, Any] | Iterable[Any] | None
    # Type of the Runner's `optim_wrapper` argument.
    OptimArgument = OptimWrapper | Optimizer | Mapping[str, Any] | None

DEFAULT_HOOKS: Mapping[str, Mapping[str, Any]] = {
    "runtime_info": {"type": "RuntimeInfoHook"},
    "timer": {"type": "IterTimerHook"},
    "class_count": {"type": "ClassCountHook"},
    "sampler_seed": {"type": "DistSamplerSeedHook"},
    "logger": {"type": "LoggerHook"},
    "param_scheduler": {"type": "ParamSchedulerHook"},
    "checkpoint": {"type": "CheckpointHook", "max_keep_ckpts": 2, "save_best": "auto"},
    "report": {"type": "ReportHook"},
    "preemption": {"type": "PreemptionHook"},
}

# The types of the Runner arguments that are neither components nor dicts of options.
_TYPES: Mapping[str, Any] = {
    "work_dir": str | Path,
    "default_hooks": Mapping | None,
    "custom_hooks": Sequence | None,
    "load_from": str | Path | None,
    "resume": bool | str | Path | None,
    "launcher": str,
    "log_level": str | NonNegativeInt,
    "default_scope": str | None,
    "experiment_name": str | None,
    "revise_keys": Sequence | None,
}


@dataclass(frozen=True)
class AutoScaleLr:
    """Options of the Runner's `auto_scale_lr` argument."""

    enable: bool = False
    """Whether to scale the learning rates."""
    base_batch_size: PositiveInt | None = None
    """Number of samples per step for which the learning rates were chosen; required if `enable` is True."""

    def __post_init__(self) -> None:
        if self.enable and self.base_batch_size is None:
            raise ConfigError(
                "is required if enable is True; set it to the number of samples per step for which the learning "
                "rates were chosen",
                "base_batch_size",
            )


def check_arguments(arguments: Mapping[str, Any]) -> AutoScaleLr:
    """Check the types of a Runner's arguments, and return the options of `auto_scale_lr`.

    Raises:
        ConfigError: an argument has an unsupported type or an invalid value.
    """
    for name, annotation in _TYPES.items():
        check(arguments[name], annotation, name)
    return options(AutoScaleLr, arguments["auto_scale_lr"], "auto_scale_lr")


def with_defaults(
    hooks: Mapping[str, Any] | None, by_epoch: bool, custom_hooks: Sequence[Any] | None = None
) -> dict[str, Any]:
    """Return the default hooks by name, updated with `hooks`; None removes a hook.

    A dict without a `type` changes the arguments of the default hook with this name.

    If `custom_hooks` contains a CheckpointHook, the default CheckpointHook does not save the best checkpoint.
    """
    defaults: dict[str, Any] = {name: dict(options) for name, options in DEFAULT_HOOKS.items()}
    defaults["checkpoint"]["interval"] = 1 if by_epoch else 1000
    if any(_hook_name(hook) == "CheckpointHook" for hook in custom_hooks or ()):
        del defaults["checkpoint"]["save_best"]
    for name, hook in (hooks or {}).items():
        changes_default = isinstance(hook, Mapping) and "type" not in hook
        if changes_default and name not in defaults:
            raise ConfigError(f"a hook needs a 'type'{did_you_mean(name, defaults)}", f"default_hooks.{name}")
        defaults[name] = {**defaults[name], **hook} if changes_default else hook
    return {name: hook for name, hook in defaults.items() if hook is not None}


def _hook_name(hook: Any) -> str:
    """Return the class name of a hook, or of the hook that a dict describes, without packages and scopes."""
    kind = hook.get("type") if isinstance(hook, Mapping) else type(hook)
    name = kind.__name__ if isinstance(kind, type) else str(kind)
    return name.rpartition(".")[2]


def unknown_key_warnings(cfg: Iterable[str], known: list[str]) -> Iterator[str]:
    """Yield a warning for each unknown key that is the name of a speed option or resembles a key in `known`.

    Unknown keys are not errors, because a configuration file may define variables.
    """
    for key in map(str, cfg):
        if key not in known and key in SpeedPlan.options():
            yield f"The Runner does not read the configuration key '{key}'; to set it, use speed=dict({key}=...)"
        elif key not in known and (similar := get_close_matches(key, known, n=1, cutoff=0.85)):
            yield f"The configuration key '{key}' is not used; did you mean '{similar[0]}'?"


_LIMIT_OPTIONS = ("limit_train_batches", "limit_val_batches", "overfit_batches")


@dataclass(frozen=True)
class Limits:
    """The maximum number of batches per epoch for each loader, as an int or a fraction; None for no limit."""

    train: float | None = None
    evaluation: float | None = None
    # Whether every epoch uses the batches of the first epoch.
    overfit: bool = False
    # The Runner's arguments that set the two limits.
    options: tuple[str, str] = ("limit_train_batches", "limit_val_batches")

    def apply(self, loader: DataLoader[Any], mode: str, name: str) -> DataLoader[Any]:
        """Return `loader`, limited to the maximum number of batches for this mode.

        Raises:
            ConfigError: the loader does not support a limit.
        """
        training = mode == "train"
        count = self.train if training else self.evaluation
        if count is None:
            return loader
        option = self.options[0 if training else 1]
        if isinstance(count, float):
            if (total := length(loader)) is None:
                raise ConfigError(
                    "a fraction requires a loader that has a length; set a number of batches", option
                )
            count = max(1, int(total * count))
        return limit_batches(loader, count, option, name, repeat=training and self.overfit)


def read_limits(arguments: Mapping[str, Any]) -> tuple[Limits, dict[str, Any]]:
    """Return the limits that a Runner's arguments set, and the arguments as modified by `fast_dev_run`.

    Raises:
        ConfigError: an option is invalid, or two mutually exclusive options are set.
    """
    for name in _LIMIT_OPTIONS:
        check(arguments[name], PositiveIntOrFraction | None, name)
    fast = arguments["fast_dev_run"]
    if not isinstance(fast, bool):
        check(fast, PositiveInt, "fast_dev_run")
    train, val, overfit = (arguments[name] for name in _LIMIT_OPTIONS)
    if fast:
        if conflicting := [name for name in (*_LIMIT_OPTIONS, "resume") if arguments[name]]:
            raise ConfigError(f"cannot be combined with {conflicting[0]}; remove one of them", "fast_dev_run")
        count = int(fast)
        return Limits(count, count, options=("fast_dev_run", "fast_dev_run")), _shorten(arguments, count)
    if train and overfit:
        raise ConfigError(
            "cannot be combined with limit_train_batches; remove one of them", "overfit_batches"
        )
    if overfit:
        return Limits(overfit, val, True, ("overfit_batches", "limit_val_batches")), dict(arguments)
    return Limits(train, val), dict(arguments)


def _shorten(arguments: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return the arguments for a run of `count` steps, with one validation run and without checkpoints.

    `PreemptionHook` is removed as well, because a later `resume=True` would resume from the checkpoint that it saves.
    """
    changed = dict(arguments)
    if isinstance(cfg := arguments["train_cfg"], Mapping):
        lengths = {"max_epochs": 1, "max_iters": count, "val_begin": 1, "dynamic_intervals": None}
        changed["train_cfg"] = {
            **{key: lengths.get(key, value) for key, value in cfg.items()},
            "val_interval": count if "max_iters" in cfg else 1,
        }
    schedulers = arguments["param_scheduler"]
    if isinstance(schedulers, list | tuple):
        changed["param_scheduler"] = [cfg for cfg in schedulers if _begins_within(cfg, count)]
    elif not _begins_within(schedulers, count):
        changed["param_scheduler"] = None
    hooks = arguments["default_hooks"] or {}
    changed["default_hooks"] = {
        "checkpoint": None,
        **{key: _without_saving(hook, key == "checkpoint") for key, hook in hooks.items()},
        "preemption": None,
    }
    if arguments["custom_hooks"]:
        kept = [_without_saving(hook) for hook in arguments["custom_hooks"]]
        changed["custom_hooks"] = [hook for hook in kept if hook is not None]
    return changed


def _without_saving(hook: Any, saves_checkpoints: bool = False) -> Any:
    """Return the hook that replaces a hook or its configuration in a run that saves no checkpoints, or None.

    Args:
        hook: the hook or its configuration.
        saves_checkpoints: whether the hook saves checkpoints, even if its type does not show it.
    """
    if saves_checkpoints or _hook_name(hook) == "CheckpointHook":
        return MonitorCheckHook.config_for(hook)
    return None if _hook_name(hook) == "PreemptionHook" else hook


def _begins_within(scheduler: Any, count: int) -> bool:
    """Return whether a scheduler begins within a run of one epoch and `count` steps."""
    begin: Any = scheduler.get("begin") if isinstance(scheduler, Mapping) else None
    return not is_number(begin) or begin < (1 if scheduler.get("by_epoch", True) else count)
