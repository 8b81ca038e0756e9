"""Convert command-line arguments to a configuration, and back."""

from __future__ import annotations

import argparse
import inspect
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from slipstream.config import Config
from slipstream.errors import ConfigError
from slipstream.recipes import compose, find_recipe, is_composed
from slipstream.recipes.shortcuts import hints, runner_overrides, set_ema

# Sections whose builders accept keys that the recipe does not list.
_OPEN_SECTIONS = [
    f"{name}.*"
    for name in ("optim_wrapper", "default_hooks", "speed", "train_dataloader", "val_dataloader",
                 "test_dataloader", "train_cfg", "val_cfg", "test_cfg")
]  # fmt: skip

# Options that `command_args` passes on to other processes.
_OPTIONS = ("config_dir", "work_dir", "launcher", "checkpoint", "resume", "trust", "budget", "find",
            "max_batch_size")  # fmt: skip

# An override that specifies a file written by `slipstream tune`.
_TUNED_OVERRIDE = re.compile(r"\+*speed=.+\.ya?ml['\"]?$")


class LoadedConfig(NamedTuple):
    """The configuration for a command, and the number of devices."""

    cfg: Config
    # Number of devices on this machine to train on (None: all); always 1 for recipes in the Runner's syntax.
    gpus: int | None


def configure(args: argparse.Namespace) -> Config:
    """Return the configuration for a command, with its overrides applied.

    Raises:
        ConfigError: the recipe, the file, a key or a value is invalid. The message includes the location.
    """
    return read_config(args).cfg


def read_config(args: argparse.Namespace) -> LoadedConfig:
    """Return the configuration for a command, with its overrides applied, and the number of devices.

    Raises:
        ConfigError: see `configure`.
    """
    loaded = load_config(args.config, args.overrides, args.config_dir, bool(args.trust))
    cfg = loaded.cfg
    path = find_recipe(args.config, args.config_dir)
    if "model" not in cfg:
        raise ConfigError(
            f"{path} is not a training configuration: the key 'model' is missing; "
            "add it, or pass a different file"
        )
    work_dir = args.work_dir or cfg.get("work_dir") or Path("work_dirs") / path.stem
    cfg.work_dir = str(Path(work_dir).expanduser())
    if getattr(args, "launcher", None) is not None:
        cfg.launcher = args.launcher
    return loaded


def load_config(
    name: str, overrides: Sequence[str] = (), config_dir: str | None = None, trust: bool = False
) -> LoadedConfig:
    """Return the configuration of a recipe or file in any supported syntax; see `Config.fromfile` for `trust`.

    Raises:
        ConfigError: see `configure`.
    """
    tuned, overrides = _tuned_file(overrides)
    loaded = _load(name, overrides, config_dir, trust)
    if tuned is not None:
        _apply_tuned(loaded.cfg, tuned, overrides)
    return loaded


def _load(name: str, overrides: Sequence[str], config_dir: str | None, trust: bool) -> LoadedConfig:
    path = find_recipe(name, config_dir)
    if is_composed(path):
        return _compose(name, overrides, config_dir, trust)
    from slipstream.runner import Runner
    from slipstream.speed import CFG_OPTIONS

    cfg = _read(path, trust)
    known = [name for name in inspect.signature(Runner).parameters if name != "cfg"]
    # Hydra marks a new key with a leading +. An override without a key stays as is, so that the error can quote it.
    words = [word if (stripped := word.lstrip("+")).startswith("=") else stripped for word in overrides]
    words = runner_overrides(cfg, set_ema(cfg, words))
    known += [*CFG_OPTIONS, *_OPEN_SECTIONS]
    cfg.override(words, known=known, hints=hints(cfg))
    return LoadedConfig(cfg, gpus=1)


def _read(path: Path | str, trust: bool) -> Config:
    """Load a configuration file; with SLIPSTREAM_OPENMMLAB=1, also in the pure Python style."""
    if os.environ.get("SLIPSTREAM_OPENMMLAB") == "1":
        from slipstream.openmmlab.config import load_config

        return load_config(path, trust=trust)
    return Config.fromfile(path, trust=trust)


def _compose(name: str, overrides: Sequence[str], config_dir: str | None, trust: bool) -> LoadedConfig:
    from slipstream.dist.placement import infer_launcher
    from slipstream.training.recipe import gpus, recipe_config

    recipe = compose(name, overrides, config_dir, trust)
    count = gpus(recipe)
    # SuperGradients' recipes specify only "DDP", not the launcher.
    launcher = "none" if count == 1 else infer_launcher(os.environ)
    return LoadedConfig(Config(recipe_config(recipe, launcher)), count)


def _tuned_file(overrides: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the file in a `speed=FILE.yaml` override (None without such an override), and the other overrides."""
    files = [word for word in overrides if _TUNED_OVERRIDE.match(word)]
    if len(files) > 1:
        raise ConfigError(f"only one file can be specified; remove all but one of {' '.join(files)}", "speed")
    file = files[0].partition("=")[2].strip("'\"") if files else None
    return file, [word for word in overrides if word not in files]


def _apply_tuned(cfg: Config, file: str, overrides: Sequence[str]) -> None:
    """Apply the options from a file written by `slipstream tune`.

    Raises:
        ConfigError: the file is invalid, or an override sets one of its options.
    """
    from slipstream.tune.result import read_tuned

    tuned = read_tuned(file)
    keys = [f"{section}.{key}" for section, values in tuned.items() for key in values]
    for word in overrides:
        name = word.lstrip("+~").partition("=")[0]
        if any(name == key or name.startswith(f"{key}.") for key in keys):
            raise ConfigError(f"'{word}' and '{file}' set the same option; remove one of them", name)
    for section, values in tuned.items():
        current = cfg.get(section) or {}
        current = {"auto": True} if current == "auto" else current
        cfg[section] = {**current, **values}


def command_args(args: argparse.Namespace, **changed: str | bool) -> list[str]:
    """Return the arguments after `slipstream` that reproduce `args` with the options in `changed` replaced."""
    options = {**vars(args), **changed}
    argv = [options["command"], args.config, *args.overrides]
    for name in _OPTIONS:
        flag, value = f"--{name.replace('_', '-')}", options.get(name)
        if value is not None:
            argv.append(flag if value is True else f"{flag}={value}")
    return argv
