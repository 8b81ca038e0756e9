"""`slipstream val`: validate a checkpoint."""

from __future__ import annotations

import argparse
from typing import Any

from slipstream.cli.configure import configure
from slipstream.cli.processes import launch, needs_launch
from slipstream.errors import CheckpointError

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Validate, and print the metrics."""
    from slipstream.checkpoint import find_latest_checkpoint
    from slipstream.model import unwrap_model
    from slipstream.runner import Runner
    from slipstream.training.config_paths import at_user_paths
    from slipstream.training.recipe import has_full_checkpoint

    must_launch = needs_launch(args)
    cfg = configure(args)
    checkpoint = args.checkpoint or cfg.get("load_from") or find_latest_checkpoint(cfg.work_dir)
    if checkpoint is None and not has_full_checkpoint(cfg):
        raise CheckpointError(f"no checkpoint found in {cfg.work_dir}; train first or set `--checkpoint`")
    if must_launch:
        return launch(args, cfg.work_dir)
    cfg.load_from, cfg.resume = checkpoint and str(checkpoint), False
    with at_user_paths(cfg):
        runner = Runner.from_cfg(cfg)
        if checkpoint is None:  # use the pretrained weights that checkpoint_params specifies
            model: Any = unwrap_model(runner.model)
            model.init_weights()
        metrics = runner.val()
    if runner.rank == 0:
        print(", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
    return 0
