"""`slipstream recipes`: list the recipes."""

from __future__ import annotations

import argparse

from slipstream.recipes import recipes

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Print the name and description of each recipe."""
    found = recipes()
    width = max(map(len, found))
    for name, purpose in found.items():
        print(f"{name:{width}}  {purpose}")
    return 0
