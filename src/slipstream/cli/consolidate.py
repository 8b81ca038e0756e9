"""`slipstream consolidate`: convert a sharded checkpoint into a single file."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Write the file and print its path. The default path is next to the checkpoint folder."""
    from slipstream.checkpoint import consolidate

    folder = Path(args.folder)
    out = Path(args.out) if args.out else folder.with_suffix(".pth")
    consolidate(folder, out)
    print(f"{folder} -> {out}")
    return 0
