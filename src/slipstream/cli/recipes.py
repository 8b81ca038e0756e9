"""`slipstream recipes` lists the recipes or shows one, and `slipstream new` writes a starter project."""

from __future__ import annotations

import argparse
import json
from importlib.resources import files
from pathlib import Path

from slipstream.config import Config
from slipstream.config.write import to_text
from slipstream.errors import ConfigError
from slipstream.files import write_text
from slipstream.recipes import compose, find_recipe, is_composed, recipes

_STARTER_FILES = ("recipe.py", "shapes.py", "README.md")


def run(args: argparse.Namespace) -> int:
    """Print the name and description of each recipe, or the values of one recipe."""
    if args.action == "show":
        return _show(args)
    descriptions = recipes(args.config_dir)
    if args.json:
        print(json.dumps(descriptions, indent=1))
        return 0
    width = max(map(len, descriptions))
    print(*(f"{name:{width}}  {purpose}" for name, purpose in descriptions.items()), sep="\n")
    return 0


def _show(args: argparse.Namespace) -> int:
    """Print the recipe with its own keys, after resolving its defaults list and applying the overrides."""
    path = find_recipe(args.config, args.config_dir)
    if is_composed(path):
        cfg = Config(compose(args.config, args.overrides, args.config_dir, bool(args.trust)))
    else:
        from slipstream.cli.configure import load_config

        cfg = load_config(args.config, args.overrides, args.config_dir, bool(args.trust)).cfg
    text = to_text(cfg.redacted(), ".json" if args.json else ".yaml")
    print(text if args.json else f"# {path}\n{text}", end="" if text.endswith("\n") else "\n")
    return 0


def new(args: argparse.Namespace) -> int:
    """Write a recipe, its dataset and a README. The recipe can be used for training without changes.

    Raises:
        ConfigError: the folder cannot be created, or is not empty.
    """
    folder = Path(args.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"the folder '{folder}' is not empty; choose a different folder")
        for name in _STARTER_FILES:
            source = files("slipstream.cli") / "starter" / name
            write_text(folder / name, source.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot write to '{folder}': {error.strerror}; choose a different folder"
        ) from error
    print(f"Written: {', '.join(str(folder / name) for name in _STARTER_FILES)}")
    print(f"To train: cd {folder} && slipstream train recipe.py")
    return 0
