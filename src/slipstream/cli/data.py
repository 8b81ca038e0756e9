"""`slipstream data`: inspect and cache a recipe's data."""

from __future__ import annotations

import argparse
import importlib

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Run `slipstream data stats`, `cache` or `show`."""
    status: int = importlib.import_module(f"slipstream.cli.data_{args.action}").run(args)
    return status
