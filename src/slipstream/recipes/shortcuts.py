"""Command-line shortcuts (`lr=0.01`) for recipes in the Runner's syntax."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from slipstream.config import Config
from slipstream.config.override import parse_value
from slipstream.errors import ConfigError

_LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader")
# Maps each shortcut to the Runner keys that it sets.
_KEYS = {
    "lr": ("optim_wrapper.optimizer.lr",),
    "batch_size": ("train_dataloader.batch_size",),
    "val_batch_size": ("val_dataloader.batch_size",),
    "epochs": ("train_cfg.max_epochs",),
    "num_workers": tuple(f"{loader}.num_workers" for loader in _LOADERS),
    "data_root_dir": tuple(
        f"{loader}.dataset.{root}" for loader in _LOADERS for root in ("data_root", "root_dir", "root")
    ),
}
# Maps names from other tools to the shortcuts.
SYNONYMS = {
    **dict.fromkeys(("learning_rate", "initial_lr"), "lr"),
    **dict.fromkeys(("num_epochs", "max_epochs"), "epochs"),
    "workers": "num_workers",
    **dict.fromkeys(("data_root", "data_dir", "root_dir", "root"), "data_root_dir"),
}


def runner_overrides(cfg: Config, overrides: Iterable[str]) -> list[str]:
    """Return the overrides, with each shortcut replaced by the Runner keys that it sets.

    The shortcuts are `lr`, `batch_size`, `val_batch_size`, `epochs`, `num_workers` and `data_root_dir`, as in recipes
    in SuperGradients syntax. A shortcut is not replaced if the configuration has a key of the same name. If the
    configuration sets no dataset folder, `data_root_dir` is removed, and a warning is logged.

    Raises:
        ConfigError: if the configuration does not contain the section of the key that a shortcut sets.
    """
    replaced = []
    for override in overrides:
        shortcut, equals, value = override.partition("=")
        if not equals or shortcut in cfg or shortcut not in _KEYS:
            replaced.append(override)
        elif keys := [key for key in _KEYS[shortcut] if _applies(cfg, key, shortcut == "data_root_dir")]:
            replaced += [f"{key}={value}" for key in keys]
        elif shortcut == "data_root_dir":
            logging.getLogger("slipstream").warning("%s has no effect: no dataset folder is set", override)
        else:
            raise ConfigError(f"sets {_KEYS[shortcut][0]}, whose section does not exist", shortcut)
    return replaced


def hints(cfg: Config) -> dict[str, str]:
    """Return a dict that maps each applicable shortcut and each of its synonyms to the shortcut."""
    names = {name: name for name, keys in _KEYS.items() if any(_applies(cfg, key, False) for key in keys)}
    synonyms = {other: shortcut for other, shortcut in SYNONYMS.items() if shortcut in names}
    return {**names, "ema": "ema", **synonyms}


def set_ema(cfg: Config, overrides: Iterable[str]) -> list[str]:
    """Apply the `ema=True` or `ema=False` shortcut, and return the other overrides.

    `False` removes each `EMAHook` from the recipe. `True` enables the `ema` speed option if the recipe has no
    `EMAHook`. Overrides with other values are returned unchanged, and later cause an unknown-key error.
    """
    rest = []
    for override in overrides:
        shortcut, _, value = override.partition("=")
        enabled = parse_value(value) if shortcut == "ema" and "ema" not in cfg else None
        if not isinstance(enabled, bool):
            rest.append(override)
            continue
        hooks = list(cfg.get("custom_hooks") or ())
        others = [hook for hook in hooks if not (isinstance(hook, Mapping) and hook.get("type") == "EMAHook")]
        if not enabled:
            cfg.custom_hooks = others
        elif len(others) == len(hooks):
            rest.append("speed.ema=True")
    return rest


def _applies(cfg: Mapping[str, Any], key: str, must_exist: bool) -> bool:
    """Return whether the section that contains the dotted `key` exists and, if `must_exist`, whether `key` exists."""
    *parents, last = key.split(".")
    node: Any = cfg
    for parent in parents:
        node = node.get(parent) if isinstance(node, Mapping) else None
    return isinstance(node, Mapping) and (last in node or not must_exist)
