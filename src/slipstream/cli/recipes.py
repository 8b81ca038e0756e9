"""`slipstream recipes`: list the recipes or show one recipe."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping

from slipstream.config import Config
from slipstream.config.write import to_text
from slipstream.errors import ConfigError
from slipstream.recipes import compose, find_recipe, is_composed, recipes

__all__ = ["run"]

_SUPERGRADIENTS = "With SuperGradients' names and keys (docs/from_supergradients.md)"


def run(args: argparse.Namespace) -> int:
    """Print the name and description of each recipe or the values of one recipe."""
    if args.action == "show":
        return _show(args)
    descriptions = recipes(args.config_dir)
    if args.json:
        print(json.dumps(descriptions, indent=1))
        return 0
    _print_list(descriptions, args.config_dir)
    return 0


def _print_list(descriptions: Mapping[str, str], config_dir: str | None) -> None:
    """Print the recipes with the Runner's keys, followed by those with SuperGradients' keys."""
    width = max(map(len, descriptions))
    composed = {name for name in descriptions if _is_composed(name, config_dir)}
    for selected in (descriptions.keys() - composed, composed):
        if selected is composed and composed:
            print(f"\n{_SUPERGRADIENTS}:")
        for name, purpose in descriptions.items():
            if name in selected:
                print(f"{name:{width}}  {purpose}")


def _is_composed(name: str, config_dir: str | None) -> bool:
    try:
        return is_composed(find_recipe(name, config_dir))
    except ConfigError:  # an invalid file must not prevent listing the others
        return False


def _show(args: argparse.Namespace) -> int:
    """Print the recipe with its own keys, after resolving its defaults list and applying the overrides."""
    path = find_recipe(args.config, args.config_dir)
    composed = is_composed(path)
    if composed:
        cfg = Config(compose(args.config, args.overrides, args.config_dir, bool(args.trust)))
    else:
        from slipstream.cli.configure import load_config

        cfg = load_config(args.config, args.overrides, args.config_dir, bool(args.trust)).cfg
    text = to_text(cfg.redacted(), ".json" if args.json else ".yaml")
    header = f"# {path}\n" + (f"# {_SUPERGRADIENTS}\n" if composed else "")
    print(text if args.json else header + text, end="" if text.endswith("\n") else "\n")
    return 0
