"""`slipstream train`: train a recipe or a configuration file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.cli.configure import configure

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["run", "summary"]


def run(args: argparse.Namespace) -> int:
    """Train, and print where everything lies."""
    from slipstream.runner import Runner

    cfg = configure(args)
    if args.launcher is not None:
        cfg.launcher = args.launcher
    if args.resume is not None:
        cfg.resume = args.resume
    runner = Runner.from_cfg(cfg)
    runner.train()
    if runner.rank == 0:
        print(summary(runner))
    return 0


def summary(runner: Runner) -> str:
    """Return one line: the last metrics, the speed, and where checkpoints, picture and logs lie."""
    hub, folder = runner.message_hub, Path(runner.work_dir)
    metrics = [
        f"{name.removeprefix('val/')} {history.current():.2f}"
        for name, history in hub.log_scalars.items()
        if name.startswith("val/") and not name.endswith("time")
    ]
    speed = hub.get_info("images_per_second")
    facts = [*metrics[:3], *([f"{speed:.1f} images/s"] if speed else [])]
    files = sorted(p.name for pattern in ("*.pth", "*.png") for p in folder.glob(pattern))
    logs = Path(runner.log_dir).relative_to(folder)
    return f"Done: {', '.join(facts)}. In {folder}: {', '.join(files)}; logs in {logs}/"
