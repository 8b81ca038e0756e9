"""Check the Runner's arguments, add default values, and add config paths to errors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config import options
from slipstream.dist import is_main_process
from slipstream.errors import ConfigError, did_you_mean
from slipstream.hooks import Hook, NotebookHook, ProgressBarHook, in_notebook
from slipstream.logging import MMLogger
from slipstream.registry import LOOPS
from slipstream.registry.registry import locate
from slipstream.runner.loops import EpochBasedTrainLoop, IterBasedTrainLoop, TestLoop, ValLoop
from slipstream.speed import SpeedPlan
from slipstream.typecheck import NonNegativeInt, PositiveInt, check, short_repr

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    from slipstream.optim import OptimWrapper

    LoaderArgument = DataLoader[Any] | Mapping[str, Any] | Sequence[Any] | None
    """Type of the Runner's `train_dataloader`, `val_dataloader` and `test_dataloader` arguments."""
    OptimArgument = OptimWrapper | Optimizer | Mapping[str, Any] | None
    """Type of the Runner's `optim_wrapper` argument."""

__all__ = [
    "DEFAULT_HOOKS",
    "LOOP_ARGUMENTS",
    "AutoScaleLr",
    "add_config_path",
    "add_loop_path",
    "check_arguments",
    "constructor_arguments",
    "display_hooks",
    "hook_name",
    "loop_options",
    "unknown_key_warnings",
    "with_defaults",
]

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

LIMIT_ARGUMENTS = ("limit_train_batches", "limit_val_batches", "overfit_batches", "fast_dev_run")
"""The Runner's arguments that limit the number of batches."""
LOOP_ARGUMENTS = {
    "train": ("train_dataloader", "train_cfg", "optim_wrapper"),
    "val": ("val_dataloader", "val_cfg", "val_evaluator"),
    "test": ("test_dataloader", "test_cfg", "test_evaluator"),
}


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
}
"""The types of the Runner arguments that are neither components nor dicts of options."""


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
    if "\0" in str(arguments["work_dir"]) or not str(arguments["work_dir"]):
        raise ConfigError(
            f"must be the path of a folder, not {short_repr(arguments['work_dir'])}", "work_dir"
        )
    try:
        str(path := Path(arguments["work_dir"]).absolute()).encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"must be encodable as UTF-8, because the path is written to text files, but {short_repr(str(path))} is "
            "not; rename the folder",
            "work_dir",
        ) from None
    for name, hook in (arguments["default_hooks"] or {}).items():
        if hook is not None and not isinstance(hook, Mapping | Hook):
            raise ConfigError(
                f"must be a hook, a dict with a 'type', or None, not {short_repr(hook)}",
                f"default_hooks.{name}",
            )
        if isinstance(hook, Mapping) and "type" not in hook and name not in DEFAULT_HOOKS:
            raise ConfigError(
                f"a hook needs a 'type'; got the keys {list(hook)}{did_you_mean(name, DEFAULT_HOOKS)}",
                f"default_hooks.{name}",
            )
    return options(AutoScaleLr, arguments["auto_scale_lr"], "auto_scale_lr")


def constructor_arguments(cfg: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the Runner's arguments from a configuration; `names` lists all argument names.

    Raises:
        ConfigError: the configuration has no `model` or `work_dir`.
    """
    for required in ("model", "work_dir"):
        if required not in cfg:
            hint = did_you_mean(required, cfg)
            raise ConfigError(f"the configuration has no '{required}', which is required{hint}")
    return {name: cfg[name] for name in names if name in cfg}


def with_defaults(
    hooks: Mapping[str, Any] | None, by_epoch: bool, custom_hooks: Sequence[Any] | None = None
) -> dict[str, Any]:
    """Return the default hooks by name, updated with `hooks`; None removes a hook.

    A dict without a `type` changes the arguments of the default hook with this name.

    If `custom_hooks` contains a CheckpointHook, the default CheckpointHook does not save the best checkpoint.
    """
    defaults: dict[str, Any] = {name: dict(options) for name, options in DEFAULT_HOOKS.items()}
    defaults["checkpoint"]["interval"] = 1 if by_epoch else 1000
    if any(hook_name(hook) == "CheckpointHook" for hook in custom_hooks or ()):
        del defaults["checkpoint"]["save_best"]
    for name, hook in (hooks or {}).items():
        changes_default = isinstance(hook, Mapping) and "type" not in hook and name in defaults
        defaults[name] = {**defaults[name], **hook} if changes_default else hook
    return {name: hook for name, hook in defaults.items() if hook is not None}


def hook_name(hook: Any) -> str:
    """Return the class name of a hook, or of the hook that a dict describes, without packages and scopes."""
    kind = hook.get("type") if isinstance(hook, Mapping) else type(hook)
    name = kind.__name__ if isinstance(kind, type) else str(kind)
    return name.rpartition(".")[2]


def display_hooks(logger: MMLogger) -> list[Hook]:
    """Return a list with the hook that displays a run in a notebook or terminal.

    The list is empty if there is neither, and on all ranks except rank 0.
    """
    if not is_main_process():
        return []
    if in_notebook():
        return [NotebookHook()]
    return [ProgressBarHook()] if logger.console.is_terminal else []


def unknown_key_warnings(cfg: Iterable[str], known: list[str]) -> Iterator[str]:
    """Yield a warning for each unknown key that is the name of a speed option or resembles a key in `known`.

    Unknown keys are not errors, because a configuration file may define variables.
    """
    for key in map(str, cfg):
        if key not in known and key in SpeedPlan.options():
            yield f"The Runner does not read the configuration key '{key}'; to set it, use speed=dict({key}=...)"
        elif key not in known and (similar := get_close_matches(key, known, n=1, cutoff=0.85)):
            yield f"The configuration key '{key}' is not used; did you mean '{similar[0]}'?"


def loop_options(mode: str, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the configuration of the loop for `mode`, or None if `arguments` do not define this loop.

    Raises:
        ConfigError: only some of the mode's three arguments are set, or the configuration of the loop is invalid.
    """
    loader, cfg_name, third = LOOP_ARGUMENTS[mode]
    missing = [name for name in LOOP_ARGUMENTS[mode] if arguments[name] is None]
    if len(missing) == 3:
        return None
    if missing:
        configured = [name for name in LOOP_ARGUMENTS[mode] if name not in missing]
        raise ConfigError(
            f"{', '.join(LOOP_ARGUMENTS[mode])} must be set together: {' and '.join(configured)} "
            f"{'is' if len(configured) == 1 else 'are'} set, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing"
            + (
                f"; set {third}='loss' to evaluate only the loss"
                if mode != "train" and third in missing
                else ""
            )
            + (
                f"; set {cfg_name}=dict() for the defaults"
                if mode != "train" and missing == [cfg_name]
                else ""
            )
        )
    if not isinstance(arguments[cfg_name], Mapping):
        raise ConfigError(f"must be a dict, not {short_repr(arguments[cfg_name])}", cfg_name)
    options = {**arguments[cfg_name], "dataloader": arguments[loader]}
    if mode == "train":
        return _train_options(options)
    return {"type": ValLoop if mode == "val" else TestLoop, "evaluator": arguments[third], **options}


def _train_options(options: dict[str, Any]) -> dict[str, Any]:
    if "type" in options:
        if "by_epoch" in options:
            raise ConfigError("'type' and 'by_epoch' are mutually exclusive; remove one of them", "train_cfg")
        if isinstance(options["type"], str):
            with add_config_path({}, "train_cfg"):
                options["type"] = LOOPS.resolve(options["type"])
        return options
    if "by_epoch" not in options:
        known = ("by_epoch", "type", "max_epochs", "max_iters")
        hint = next((h for key in options if key not in known and (h := did_you_mean(key, known))), "")
        raise ConfigError(
            f"requires by_epoch=True (with max_epochs) or by_epoch=False (with max_iters){hint}", "train_cfg"
        )
    by_epoch = options.pop("by_epoch")
    check(by_epoch, bool, "train_cfg.by_epoch")
    return {"type": EpochBasedTrainLoop if by_epoch else IterBasedTrainLoop, **options}


def add_loop_path(error: ConfigError, mode: str) -> None:
    """Prefix `error.path` with the name of the Runner argument that the loop option belongs to."""
    loader, cfg_name, third = LOOP_ARGUMENTS[mode]
    head = re.split(r"[.\[]", error.path)[0]
    if head == "metrics":  # the Evaluator's name for the argument `evaluator`
        error.path = error.path.replace(head, "evaluator", 1)
        head = "evaluator"
    if head in LIMIT_ARGUMENTS:
        return
    paths = {"dataloader": loader, "evaluator": third, "": cfg_name, loader: loader, cfg_name: cfg_name}
    error.path = paths[head] + error.path[len(head) :] if head in paths else f"{cfg_name}.{error.path}"


@contextmanager
def add_config_path(user_cfg: Mapping[str, Any], default: str = "") -> Iterator[None]:
    """Prefix the path of each `ConfigError` with the path of its `source` dict in `user_cfg`, or with `default`."""
    try:
        yield
    except ConfigError as error:
        source = getattr(error, "source", None)
        path = ("" if source is None else locate(source, user_cfg) or "").lstrip(".") or default
        if path:
            dot = "" if not error.path or error.path.startswith("[") else "."
            error.path = path + dot + error.path
            error.source = None  # type: ignore[attr-defined]  # an outer block must not prefix it again
        raise
