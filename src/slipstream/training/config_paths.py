"""Map config paths in the Runner's errors to SuperGradients' configuration keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from slipstream.errors import BuildError, ConfigError

__all__ = ["LAST_OWN_HOOK", "at_user_paths"]

LAST_OWN_HOOK = "LrPlotHook"
"""The last hook that the translation inserts before the hooks from `phase_callbacks`."""

_PATHS = (
    (r"training_params\.ema\.type", "training_params.ema_params.decay_type"),
    (r"training_params\.ema\.", "training_params.ema_params."),
    (r"training_params\.torch_compile\.", "training_params.torch_compile_options."),
    (r"model\.training_params\.", "training_params."),
    (
        r"(custom_hooks\[\d+\]\.metric|default_hooks\.checkpoint\.save_best)$",
        "training_params.metric_to_watch",
    ),
    (r"param_scheduler\[\d+\]", "training_params.lr_mode"),
    (r"val_evaluator(?=\[)", "training_params.valid_metrics_list"),
    (r"model\.train_metrics(?=\[)", "training_params.train_metrics_list"),
    (r"train_dataloader\.dataset", "dataset_params.train_dataset_params"),
    (r"val_dataloader\.dataset", "dataset_params.val_dataset_params"),
    (r"train_dataloader\.", "dataset_params.train_dataloader_params."),
    (r"val_dataloader\.", "dataset_params.val_dataloader_params."),
)
_NAMED = {
    "optim_wrapper.optimizer": ("training_params.optimizer", "training_params.optimizer_params"),
    "model.loss": ("training_params.loss", "training_params.criterion_params"),
    "model.network": ("architecture", "arch_params"),
}
"""Maps each component's config path in the Runner to the user's config paths of its name and its arguments."""


@contextmanager
def at_user_paths(cfg: Mapping[str, Any]) -> Iterator[None]:
    """Rewrite config paths in the Runner's errors to match the user's configuration.

    The `cfg` argument is the Runner's configuration, translated from the user's configuration. If the user's
    configuration already uses the Runner's syntax, errors are not changed.
    """
    try:
        yield
    except ConfigError as error:
        model = cfg.get("model")
        if "training_params" in cfg and isinstance(model, Mapping) and model.get("type") == "SupervisedModel":
            error.path = _user_path(error, cfg)
        raise


def _user_path(error: ConfigError, cfg: Mapping[str, Any]) -> str:
    path = error.path
    if path == "training_params.torch_compile.mode" and "torch_compile_mode" in cfg["training_params"]:
        return "training_params.torch_compile_mode"
    for part, (name, arguments) in _NAMED.items():
        if path == part:
            return arguments if isinstance(error, BuildError) else name
        if path.startswith(f"{part}."):
            return arguments + path.removeprefix(part)
    found = re.match(r"custom_hooks\[(\d+)\]", path)
    if found and (index := int(found[1]) - _own_hooks(cfg)) >= 0:
        return f"training_params.phase_callbacks[{index}]{path[found.end() :]}"
    for pattern, user_path in _PATHS:
        if found := re.match(pattern, path):
            return user_path + path[found.end() :]
    return path


def _own_hooks(cfg: Mapping[str, Any]) -> int:
    """Return the number of hooks that precede those from `phase_callbacks`."""
    hooks = cfg.get("custom_hooks") or ()
    kinds = [hook.get("type") if isinstance(hook, Mapping) else type(hook).__name__ for hook in hooks]
    return kinds.index(LAST_OWN_HOOK) + 1 if LAST_OWN_HOOK in kinds else 0
