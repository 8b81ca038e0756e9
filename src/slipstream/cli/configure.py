"""From the words of a command line to a configuration."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path

from slipstream.config import Config
from slipstream.errors import ConfigError
from slipstream.recipes import find_recipe

__all__ = ["configure"]

# Parts whose builders know keys that a recipe need not write down.
_OPEN = ("optim_wrapper.*", "train_dataloader.*", "val_dataloader.*", "test_dataloader.*", "default_hooks.*")


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
    if args.work_dir:
        cfg.work_dir = args.work_dir
    cfg.setdefault("work_dir", str(Path("work_dirs") / path.stem))
    return cfg
