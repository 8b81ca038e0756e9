"""`slipstream train` and `slipstream val`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.configure import configure, read_config
from slipstream.cli.processes import launch, needs_launch, restarted_with_progress

if TYPE_CHECKING:
    from slipstream.config import Config
    from slipstream.logging import MessageHub
    from slipstream.runner import Runner


def run(args: argparse.Namespace) -> int:
    """Train, and print a summary."""
    from slipstream.training.config_paths import at_user_paths

    cfg, gpus = read_config(args)
    if needs_launch(args):
        return launch(args, cfg.work_dir)
    if args.launcher is None and cfg.get("launcher", "none") == "none" and (count := _devices(cfg, gpus)) > 1:
        args.nproc = str(count)
        return launch(args, cfg.work_dir)
    _resume(args, cfg)
    with at_user_paths(cfg):
        runner = _runner_class().from_cfg(cfg)
        runner.train()
    if runner.rank == 0:
        print(summary(runner))
    return 0


def validate(args: argparse.Namespace) -> int:
    """Validate a checkpoint, and print the metrics."""
    from slipstream.checkpoint import find_latest_checkpoint
    from slipstream.errors import CheckpointError
    from slipstream.model import unwrap_model
    from slipstream.runner import Runner
    from slipstream.training.config_paths import at_user_paths
    from slipstream.training.recipe import has_full_checkpoint

    must_launch, cfg = needs_launch(args), configure(args)
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


def _runner_class() -> type[Runner]:
    """Return the Runner class. With SLIPSTREAM_OPENMMLAB=1, the class has MMEngine's defaults."""
    if os.environ.get("SLIPSTREAM_OPENMMLAB") == "1":
        from slipstream.openmmlab.runner import Runner as WithDefaults

        return WithDefaults
    from slipstream.runner import Runner

    return Runner


def _devices(cfg: Config, expected: int | None) -> int:
    """Return the number of devices to train on. Warn if this machine has fewer than the recipe expects."""
    if expected == 1:
        return 1
    import torch

    count = torch.accelerator.device_count()
    if expected is None or count >= expected:
        return expected or count
    available, batch = max(count, 1), cfg.train_dataloader.batch_size
    print(
        f"slipstream: warning: the recipe expects {expected} GPUs, but this machine has {count}; the batch size is "
        f"{available} x {batch} instead of {expected} x {batch}. Set training_params.batch_accumulate="
        f"{-(-expected // available)} to compensate, or num_gpus={available} to disable this warning",
        file=sys.stderr,
    )
    return available


def _resume(args: argparse.Namespace, cfg: Config) -> None:
    from slipstream.checkpoint import newest_checkpoints

    if args.resume is not None:
        cfg.resume = args.resume
    if args.resume is True or restarted_with_progress(cfg.work_dir):
        # Without checkpoints of this run, a Runner with `resume=True` would continue at the position of `load_from`.
        cfg.resume = not cfg.get("load_from") or next(newest_checkpoints(cfg.work_dir), None) is not None


def summary(runner: Runner) -> str:
    """Return one line with the last and best metrics, the speed, and the folder."""
    hub, folder = runner.message_hub, runner.work_dir
    metrics = [
        _with_best(name.removeprefix("val/"), history.current(), hub)
        for name, history in hub.log_scalars.items()
        if name.startswith("val/") and not name.endswith("time")
    ]
    speed = hub.get_info("images_per_second")
    results = [*metrics[:3], *([f"{speed:.1f} images/s including the first step"] if speed else [])]
    pictures = Path(folder) / "predictions.png"
    more = f", pictures in {pictures}" if pictures.is_file() else ""
    return f"Done: {', '.join(results)}. Checkpoints in {folder}, logs in {runner.log_dir}{more}"


def _with_best(name: str, value: float, hub: MessageHub) -> str:
    # A value below 1 is probably a fraction, which requires more decimals than a percentage.
    last, score = f"{value:.{4 if abs(value) < 1 else 2}f}", hub.get_info(f"best_score/{name}")
    best = last if score is None else f"{score:.{4 if abs(score) < 1 else 2}f}"
    return f"{name} {last}" if best == last else f"{name} {last} (best {best})"
