"""The Runner's options for short runs: limits on the number of batches, `overfit_batches` and `fast_dev_run`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from slipstream.dataset.loading.loader import limit_batches
from slipstream.errors import ConfigError
from slipstream.hooks import MonitorCheckHook
from slipstream.runner.user_config import hook_name
from slipstream.typecheck import PositiveInt, check, is_number

__all__ = ["Limits", "read_limits"]

_LIMIT_OPTIONS = ("limit_train_batches", "limit_val_batches", "overfit_batches")


@dataclass(frozen=True)
class Limits:
    """The maximum number of batches per epoch for each loader; None for no limit."""

    train: int | None = None
    evaluation: int | None = None
    overfit: bool = False
    """Whether every epoch uses the batches of the first epoch."""
    options: tuple[str, str] = ("limit_train_batches", "limit_val_batches")
    """The Runner's arguments that set the two limits."""

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
        return limit_batches(loader, count, option, name, repeat=training and self.overfit)


def read_limits(arguments: Mapping[str, Any]) -> tuple[Limits, dict[str, Any]]:
    """Return the limits that a Runner's arguments set, and the arguments as modified by `fast_dev_run`.

    Raises:
        ConfigError: an option is invalid, or two mutually exclusive options are set.
    """
    for name in _LIMIT_OPTIONS:
        check(arguments[name], PositiveInt | None, name)
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
    if saves_checkpoints or hook_name(hook) == "CheckpointHook":
        return MonitorCheckHook.config_for(hook)
    return None if hook_name(hook) == "PreemptionHook" else hook


def _begins_within(scheduler: Any, count: int) -> bool:
    """Return whether a scheduler begins within a run of one epoch and `count` steps."""
    begin: Any = scheduler.get("begin") if isinstance(scheduler, Mapping) else None
    return not is_number(begin) or begin < (1 if scheduler.get("by_epoch", True) else count)
