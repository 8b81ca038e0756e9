"""From the words of a command line to a configuration, and back."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path

from slipstream.config import Config
from slipstream.errors import ConfigError
from slipstream.recipes import find_recipe

__all__ = ["command_words", "configure"]

# Parts whose builders know keys that a recipe need not write down.
_OPEN = (
    "optim_wrapper.*",
    "train_dataloader.*",
    "val_dataloader.*",
    "test_dataloader.*",
    "default_hooks.*",
    "speed.*",
)


def configure(args: argparse.Namespace) -> Config:
    """Return the configuration of a command, with its overrides.

    Raises:
        ConfigError: an unknown recipe, file, key or value; it says where.
    """
    from slipstream.runner import Runner
    from slipstream.speed import CFG_LEVERS

    path = find_recipe(args.config)
    cfg = Config.fromfile(path)
    known = [name for name in inspect.signature(Runner).parameters if name != "cfg"]
    cfg.override(args.overrides, known=[*known, *CFG_LEVERS, *_OPEN])
    if "model" not in cfg:
        raise ConfigError(f"{path} is no configuration of a run: it has no 'model'")
    work_dir = args.work_dir or cfg.get("work_dir") or Path("work_dirs") / path.stem
    cfg.work_dir = str(Path(work_dir).expanduser())
    if getattr(args, "launcher", None) is not None:
        cfg.launcher = args.launcher
    return cfg


def command_words(args: argparse.Namespace, **changed: str | bool) -> list[str]:
    """Return the words after `slipstream` that mean `args`, but with the options in `changed`."""
    options = {**vars(args), **changed}
    words = [options["command"], args.config, *args.overrides]
    for name in ("work_dir", "launcher", "checkpoint", "resume"):
        flag, value = f"--{name.replace('_', '-')}", options.get(name)
        if value is not None:
            words.append(flag if value is True else f"{flag}={value}")
    return words
