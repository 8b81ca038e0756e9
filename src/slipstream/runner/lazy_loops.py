"""A run's training, validation and test loops, each of which is built on first access."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slipstream.errors import ConfigError, did_you_mean
from slipstream.registry import LOOPS
from slipstream.runner.loops import BaseLoop, EpochBasedTrainLoop, IterBasedTrainLoop, TestLoop, ValLoop
from slipstream.runner.user_config import add_config_path
from slipstream.typecheck import check, short_repr

if TYPE_CHECKING:
    from slipstream.runner.runner import Runner

__all__ = ["LazyLoops"]

_ARGUMENTS = {
    "train": ("train_dataloader", "train_cfg", "optim_wrapper"),
    "val": ("val_dataloader", "val_cfg", "val_evaluator"),
    "test": ("test_dataloader", "test_cfg", "test_evaluator"),
}
_LIMITS = ("limit_train_batches", "limit_val_batches", "overfit_batches", "fast_dev_run")
"""The Runner's arguments that limit the number of batches."""


class LazyLoops:
    """The loops that are defined by a Runner's arguments.

    Args:
        runner: the Runner that owns the loops.
        arguments: the Runner's arguments.

    Raises:
        ConfigError: only some of a loop's three arguments are set, or the configuration of a loop is invalid.
    """

    def __init__(self, runner: Runner, arguments: Mapping[str, Any]) -> None:
        self._runner = runner
        self._loops: dict[str, Any] = {mode: _loop_options(mode, arguments) for mode in _ARGUMENTS}

    def __contains__(self, mode: str) -> bool:
        return self._loops[mode] is not None

    def require(self, mode: str) -> None:
        """Check that the arguments define the loop for `mode`.

        Raises:
            ConfigError: the arguments do not define the loop.
        """
        if mode not in self:
            *others, last = _ARGUMENTS[mode]
            call = "training" if mode == "train" else f"{mode}()"
            raise ConfigError(f"{call} requires {', '.join(others)} and {last}", "Runner")

    def get(self, mode: str) -> Any:
        """Return the loop for `mode`, or None if the arguments do not define the loop. The first call builds it."""
        loop = self._loops[mode]
        if isinstance(loop, Mapping):
            try:
                loop = self._loops[mode] = LOOPS.build(loop, default_args={"runner": self._runner})
            except ConfigError as error:
                _add_path(error, mode)
                raise
        return loop

    def get_if_built(self, mode: str) -> Any:
        """Return the loop for `mode`, or None if it is not defined or has not been built."""
        loop = self._loops[mode]
        return None if isinstance(loop, Mapping) else loop

    @property
    def by_epoch(self) -> bool:
        """Whether training is epoch-based; True if there is no training loop."""
        loop = self._loops["train"]
        kind = loop["type"] if isinstance(loop, Mapping) else type(loop)
        counts_epochs: bool = getattr(kind, "counts_epochs", True)
        return counts_epochs

    def count(self, name: str, default: int) -> int:
        """Return a counter of the training loop, such as `iter`; `default` if the loop has not been built."""
        loop = self.get_if_built("train")
        count: int = default if loop is None else getattr(loop, name)
        return count

    def end_workers(self) -> None:
        """Stop the worker processes of all loaders."""
        for loop in self._loops.values():
            if isinstance(loop, BaseLoop):
                loop.end_loading()


def _loop_options(mode: str, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the configuration of the loop for `mode`, or None if `arguments` do not define this loop."""
    loader, cfg_name, third = _ARGUMENTS[mode]
    missing = [name for name in _ARGUMENTS[mode] if arguments[name] is None]
    if len(missing) == 3:
        return None
    if missing:
        hints = {cfg_name: f"{cfg_name}=dict() for the defaults", third: f"{third}='loss' for the mean loss"}
        shown = [hints[name] for name in missing if name in hints and mode != "train"]
        raise ConfigError(
            f"{', '.join(_ARGUMENTS[mode])} must be set together, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing{'; set ' if shown else ''}{' and '.join(shown)}"
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


def _add_path(error: ConfigError, mode: str) -> None:
    """Prefix `error.path` with the name of the Runner argument that the loop option belongs to."""
    loader, cfg_name, third = _ARGUMENTS[mode]
    head = re.split(r"[.\[]", error.path)[0]
    if head in _LIMITS:
        return
    # The Evaluator calls the argument `evaluator` `metrics`.
    paths = {"dataloader": loader, "evaluator": third, "metrics": third, "": cfg_name}
    paths |= {loader: loader, cfg_name: cfg_name}
    error.path = paths[head] + error.path[len(head) :] if head in paths else f"{cfg_name}.{error.path}"
