"""Reduce a configuration to its training steps, so that they can be measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.config import Config
from slipstream.hooks import CheckpointHook, PreemptionHook, ProfilerHook, ReportHook
from slipstream.registry import HOOKS

__all__ = ["hook_class", "keep_training_only", "writes_files"]


def keep_training_only(cfg: Config, work_dir: str | Path) -> None:
    """Remove validation, tests, checkpoints, profiles, reports, trackers and resuming from a configuration, in place.

    Without the preemption hook, which would save a checkpoint, signals have their default effect.

    Args:
        cfg: the configuration of a Runner.
        work_dir: the folder for files that the run still writes.
    """
    for mode in ("val", "test"):
        for part in ("dataloader", "cfg", "evaluator"):
            cfg[f"{mode}_{part}"] = None
    hooks = {**(cfg.get("default_hooks") or {}), "checkpoint": None, "report": None, "preemption": None}
    cfg.default_hooks = {name: None if writes_files(hook) else hook for name, hook in hooks.items()}
    cfg.custom_hooks = [hook for hook in cfg.get("custom_hooks") or () if not writes_files(hook)]
    cfg.visualizer, cfg.resume, cfg.work_dir = None, False, str(work_dir)


def hook_class(hook: Any) -> Any:
    """Return the class of a hook or of a hook config. If the config is invalid, the return value may not be a class."""
    if not isinstance(hook, Mapping):
        return type(hook)
    kind = hook.get("type")
    return HOOKS.get(kind) if isinstance(kind, str) else kind


def writes_files(hook: Any) -> bool:
    """Return whether a hook saves checkpoints, profiles or reports, possibly outside the work_dir."""
    kind = hook_class(hook)
    return isinstance(kind, type) and issubclass(
        kind, CheckpointHook | PreemptionHook | ProfilerHook | ReportHook
    )
