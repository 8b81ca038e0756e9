"""`slipstream train`: train a recipe or a configuration file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.cli.configure import read_config
from slipstream.cli.processes import launch, restarted_with_progress, wants_processes

if TYPE_CHECKING:
    from slipstream.config import Config
    from slipstream.runner import Runner

__all__ = ["run", "summary"]


def run(args: argparse.Namespace) -> int:
    """Train, and print where everything lies."""
    from slipstream.runner import Runner
    from slipstream.training.config_paths import at_user_paths

    cfg, gpus = read_config(args)
    if wants_processes(args):
        return launch(args, cfg.work_dir)
    if args.launcher is None and cfg.get("launcher", "none") == "none" and (count := _devices(cfg, gpus)) > 1:
        args.nproc = str(count)
        return launch(args, cfg.work_dir)
    _resume(args, cfg)
    with at_user_paths(cfg):
        runner = Runner.from_cfg(cfg)
        runner.train()
    if runner.rank == 0:
        print(summary(runner))
    return 0


def _devices(cfg: Config, wanted: int | None) -> int:
    """Return on how many devices of this machine to train; if they are fewer than wanted, say what comes of it."""
    if wanted == 1:
        return 1
    import torch

    count = torch.accelerator.device_count()
    if wanted is None or count >= wanted:
        return wanted or count
    there, batch = max(count, 1), cfg.train_dataloader.batch_size
    print(
        f"slipstream: warning: the recipe trains on {wanted} GPUs, and this machine has {count}: the batch is "
        f"{there} x {batch}, not {wanted} x {batch}. training_params.batch_accumulate={-(-wanted // there)} makes up "
        f"for it; num_gpus={there} says that it is meant",
        file=sys.stderr,
    )
    return there


def _resume(args: argparse.Namespace, cfg: Config) -> None:
    from slipstream.checkpoint import find_latest_checkpoint

    if args.resume is not None:
        cfg.resume = args.resume
    if args.resume is True or restarted_with_progress(cfg.work_dir):
        # Not left at True, with which a Runner prefers `load_from` to the checkpoints of the run itself.
        latest = find_latest_checkpoint(cfg.work_dir)
        cfg.resume = str(latest) if latest is not None else not cfg.get("load_from")


def summary(runner: Runner) -> str:
    """Return one line: the last metrics, the speed, and where checkpoints, picture and logs lie."""
    hub, folder = runner.message_hub, Path(runner.work_dir)
    metrics = [
        f"{name.removeprefix('val/')} {_shown(history.current())}"
        for name, history in hub.log_scalars.items()
        if name.startswith("val/") and not name.endswith("time")
    ]
    speed = hub.get_info("images_per_second")
    results = [*metrics[:3], *([f"{speed:.1f} images/s"] if speed else [])]
    files = sorted(p.name for pattern in ("*.pth", "*.sharded", "*.png") for p in folder.glob(pattern))
    logs = Path(runner.log_dir).relative_to(folder)
    return f"Done: {', '.join(results)}. In {folder}: {', '.join(files)}; logs in {logs}/"


def _shown(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1 else f"{value:.2f}"  # a share, or percent
