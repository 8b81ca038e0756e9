"""What a Runner was given: which parts belong together, and what they mean."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from slipstream.errors import ConfigError, did_you_mean
from slipstream.registry import LOOPS
from slipstream.registry.build import locate
from slipstream.runner.loops import EpochBasedTrainLoop, IterBasedTrainLoop, TestLoop, ValLoop

__all__ = [
    "DEFAULT_HOOKS",
    "TRIPLES",
    "loop_options",
    "place_in_loop",
    "placing",
    "unread_keys",
    "with_defaults",
]

DEFAULT_HOOKS: Mapping[str, Mapping[str, Any]] = {
    "runtime_info": {"type": "RuntimeInfoHook"},
    "timer": {"type": "IterTimerHook"},
    "class_count": {"type": "ClassCountHook"},
    "sampler_seed": {"type": "DistSamplerSeedHook"},
    "logger": {"type": "LoggerHook"},
    "param_scheduler": {"type": "ParamSchedulerHook"},
    "checkpoint": {"type": "CheckpointHook"},
}

TRIPLES = {
    "train": ("train_dataloader", "train_cfg", "optim_wrapper"),
    "val": ("val_dataloader", "val_cfg", "val_evaluator"),
    "test": ("test_dataloader", "test_cfg", "test_evaluator"),
}


def with_defaults(hooks: Mapping[str, Any] | None, by_epoch: bool) -> list[Any]:
    """Return the default hooks with those of `hooks` in their places; None takes one away."""
    interval = 1 if by_epoch else 1000
    defaults = {**DEFAULT_HOOKS, "checkpoint": {**DEFAULT_HOOKS["checkpoint"], "interval": interval}}
    return [hook for hook in {**defaults, **(hooks or {})}.values() if hook is not None]


def unread_keys(cfg: Iterable[str], known: list[str]) -> Iterator[str]:
    """Return a line for each key that nobody reads and that is nearly one of `known`.

    It is no error: a configuration file may hold variables of its own.
    """
    for key in cfg:
        if key not in known and (near := get_close_matches(key, known, n=1, cutoff=0.85)):
            yield f"Nothing reads the configuration's key '{key}'; did you mean '{near[0]}'?"


def loop_options(mode: str, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the configuration of a mode's loop, or None if the Runner has none.

    Raises:
        ConfigError: only some of the mode's three arguments are given, or the loop is not named clearly.
    """
    loader, cfg_name, third = TRIPLES[mode]
    missing = [name for name in TRIPLES[mode] if given[name] is None]
    if len(missing) == 3:
        return None
    if missing:
        there = [name for name in TRIPLES[mode] if name not in missing]
        raise ConfigError(
            f"{', '.join(TRIPLES[mode])} belong together: {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing beside {' and '.join(there)}"
        )
    if not isinstance(given[cfg_name], Mapping):
        raise ConfigError(f"must be a dict, not {given[cfg_name]!r}", cfg_name)
    options = {**given[cfg_name], "dataloader": given[loader]}
    if mode == "train":
        return _train_options(options)
    return {"type": ValLoop if mode == "val" else TestLoop, "evaluator": given[third], **options}


def _train_options(options: dict[str, Any]) -> dict[str, Any]:
    if "type" in options:
        if "by_epoch" in options:
            raise ConfigError("give type or by_epoch, not both", "train_cfg")
        if isinstance(options["type"], str):
            with placing({}, "train_cfg"):
                options["type"] = LOOPS.resolve(options["type"])
        return options
    if "by_epoch" not in options:
        known = ("by_epoch", "type", "max_epochs", "max_iters")
        hint = next((h for key in options if (h := did_you_mean(key, known))), "")
        raise ConfigError(
            f"needs by_epoch=True (with max_epochs) or False (with max_iters){hint}", "train_cfg"
        )
    by_epoch = options.pop("by_epoch")
    if not isinstance(by_epoch, bool):
        raise ConfigError(f"must be true or false, not {by_epoch!r}", "train_cfg.by_epoch")
    return {"type": EpochBasedTrainLoop if by_epoch else IterBasedTrainLoop, **options}


def place_in_loop(error: ConfigError, mode: str) -> None:
    """Name the argument of the Runner that an error inside a loop's configuration belongs to."""
    loader, cfg_name, third = TRIPLES[mode]
    head = re.split(r"[.\[]", error.path)[0]
    if head == "metrics":  # what an Evaluator calls its part of the configuration
        error.path = error.path.replace(head, "evaluator", 1)
        head = "evaluator"
    places = {"dataloader": loader, "evaluator": third, "": cfg_name, loader: loader, cfg_name: cfg_name}
    place = places[head] + error.path[len(head) :] if head in places else f"{cfg_name}.{error.path}"
    error.path = place


@contextmanager
def placing(given: Mapping[str, Any], within: str = "") -> Iterator[None]:
    """Place errors where the dict that they are about stands in `given`; those about no such dict, in `within`."""
    try:
        yield
    except ConfigError as error:
        source = getattr(error, "source", None)
        place = ("" if source is None else locate(source, given) or "").lstrip(".") or within
        if place:
            dot = "" if not error.path or error.path.startswith("[") else "."
            error.path = place + dot + error.path
            error.source = None  # type: ignore[attr-defined]  # an outer place must not come on top
        raise
