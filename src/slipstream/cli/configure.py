"""From the words of a command line to a configuration, and back."""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from slipstream.config import Config
from slipstream.errors import ConfigError
from slipstream.recipes import compose, find_recipe, is_composed

__all__ = ["Configured", "command_words", "configure", "load_config", "read_config"]

# Parts whose builders know keys that a recipe need not write down.
_OPEN = (
    "optim_wrapper.*",
    "train_dataloader.*",
    "val_dataloader.*",
    "test_dataloader.*",
    "default_hooks.*",
    "speed.*",
)


class Configured(NamedTuple):
    """What a command shall run."""

    cfg: Config
    gpus: int | None
    """On how many devices of this machine a recipe trains, None for all; 1 for all but SuperGradients' recipes."""


def configure(args: argparse.Namespace) -> Config:
    """Return the configuration of a command, with its overrides.

    Raises:
        ConfigError: an unknown recipe, file, key or value; it says where.
    """
    return read_config(args).cfg


def read_config(args: argparse.Namespace) -> Configured:
    """Return the configuration of a command, with its overrides, and the number of devices that it asks for.

    Raises:
        ConfigError: see `configure`.
    """
    read = load_config(args.config, args.overrides, args.config_dir)
    cfg = read.cfg
    path = find_recipe(args.config, args.config_dir)
    if "model" not in cfg:
        raise ConfigError(f"{path} is no configuration of a run: it has no 'model'")
    work_dir = args.work_dir or cfg.get("work_dir") or Path("work_dirs") / path.stem
    cfg.work_dir = str(Path(work_dir).expanduser())
    if getattr(args, "launcher", None) is not None:
        cfg.launcher = args.launcher
    return read


def load_config(name: str, overrides: Sequence[str] = (), config_dir: str | None = None) -> Configured:
    """Return the configuration of a recipe or file, whoever's words it is written in.

    Raises:
        ConfigError: see `configure`.
    """
    path = find_recipe(name, config_dir)
    if is_composed(path):
        return _composed(name, overrides, config_dir)
    from slipstream.runner import Runner
    from slipstream.speed import CFG_OPTIONS

    cfg = Config.fromfile(path)
    known = [name for name in inspect.signature(Runner).parameters if name != "cfg"]
    # A + says to Hydra that a key is new.
    cfg.override([word.lstrip("+") for word in overrides], known=[*known, *CFG_OPTIONS, *_OPEN])
    return Configured(cfg, gpus=1)


def _composed(name: str, overrides: Sequence[str], config_dir: str | None) -> Configured:
    from slipstream.dist.placement import infer_launcher
    from slipstream.training.recipe import gpus, recipe_config

    recipe = compose(name, overrides, config_dir)
    count = gpus(recipe)
    # SuperGradients' recipes say "DDP", never who starts the processes.
    launcher = "none" if count == 1 else infer_launcher(os.environ)
    return Configured(Config(recipe_config(recipe, launcher)), count)


def command_words(args: argparse.Namespace, **changed: str | bool) -> list[str]:
    """Return the words after `slipstream` that mean `args`, but with the options in `changed`."""
    options = {**vars(args), **changed}
    words = [options["command"], args.config, *args.overrides]
    for name in ("config_dir", "work_dir", "launcher", "checkpoint", "resume"):
        flag, value = f"--{name.replace('_', '-')}", options.get(name)
        if value is not None:
            words.append(flag if value is True else f"{flag}={value}")
    return words
