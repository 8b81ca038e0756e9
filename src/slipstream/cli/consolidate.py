"""`slipstream consolidate`: one ordinary file from a sharded checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Write the file, beside the folder unless it is named, and print where it lies."""
    from slipstream.checkpoint import consolidate

    folder = Path(args.folder)
    out = Path(args.out) if args.out else folder.with_suffix(".pth")
    consolidate(folder, out)
    print(f"{folder} -> {out}")
    return 0
