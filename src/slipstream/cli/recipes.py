"""`slipstream recipes`: list the recipes, show one recipe, or print the JSON schema for recipes."""

from __future__ import annotations

import argparse
import json

from slipstream.config import Config
from slipstream.config.write import to_text
from slipstream.recipes import compose, find_recipe, is_composed, recipes

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Print the name and description of each recipe, the values of one recipe, or the schema."""
    if args.action == "show":
        return _show(args)
    if args.action == "schema":
        from slipstream.cli.recipe_schema import recipe_schema

        print(json.dumps(recipe_schema(), indent=1))
        return 0
    descriptions = recipes(args.config_dir)
    if args.json:
        print(json.dumps(descriptions, indent=1))
        return 0
    width = max(map(len, descriptions))
    for name, purpose in descriptions.items():
        print(f"{name:{width}}  {purpose}")
    return 0


def _show(args: argparse.Namespace) -> int:
    """Print the values in the syntax of the recipe, with its defaults list resolved and the overrides applied."""
    path = find_recipe(args.config, args.config_dir)
    if is_composed(path):
        cfg = Config(compose(args.config, args.overrides, args.config_dir, bool(args.trust)))
    else:
        from slipstream.cli.configure import load_config

        cfg = load_config(args.config, args.overrides, args.config_dir, bool(args.trust)).cfg
    text = to_text(cfg.redacted(), ".json" if args.json else ".yaml")
    print(text if args.json else f"# {path}\n{text}", end="" if text.endswith("\n") else "\n")
    return 0
