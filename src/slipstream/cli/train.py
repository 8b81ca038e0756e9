"""`slipstream train`: train a model with a recipe or a configuration file."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.cli.configure import read_config
from slipstream.cli.processes import launch, needs_launch, restarted_with_progress

if TYPE_CHECKING:
    from slipstream.config import Config
    from slipstream.logging import MessageHub
    from slipstream.runner import Runner

__all__ = ["run", "summary"]


def run(args: argparse.Namespace) -> int:
    """Train, and print a summary. With `--sweep` or `--multirun`, train several times."""
    if args.sweep or args.multirun:
        from slipstream.cli.sweep import sweep

        return sweep(args)
    from slipstream.training.config_paths import at_user_paths

    cfg, gpus = read_config(args)
    if needs_launch(args):
        return launch(args, cfg.work_dir)
    if args.launcher is None and cfg.get("launcher", "none") == "none" and (count := _devices(cfg, gpus)) > 1:
        args.nproc = str(count)
        return launch(args, cfg.work_dir)
    _resume(args, cfg)
    if args.result and cfg.get("resume"):
        from slipstream.cli.sweep import check_length

        check_length(cfg)
    with at_user_paths(cfg):
        runner = _runner_class().from_cfg(cfg)
        runner.train()
    if runner.rank == 0:
        if args.result:
            from slipstream.cli.sweep import write_result

            write_result(args.result, runner)
        print(summary(runner))
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
        # With `resume=True`, a Runner resumes from `load_from`, if it is set, instead of from this run's checkpoints.
        if next(newest_checkpoints(cfg.work_dir), None):
            cfg.resume, cfg.load_from = True, None
        else:
            cfg.resume = not cfg.get("load_from")


def summary(runner: Runner) -> str:
    """Return one line with the last and best metrics, the speed, and the paths of checkpoints, plots and logs."""
    hub, folder = runner.message_hub, Path(runner.work_dir)
    metrics = [
        _with_best(name.removeprefix("val/"), history.current(), hub)
        for name, history in hub.log_scalars.items()
        if name.startswith("val/") and not name.endswith("time")
    ]
    speed = hub.get_info("images_per_second")
    results = [*metrics[:3], *([f"{speed:.1f} images/s including the first step"] if speed else [])]
    found = sorted(p.name for pattern in ("*.pth", "*.sharded", "*.png") for p in folder.glob(pattern))
    best = {Path(str(path)).name for key, path in hub.runtime_info.items() if key.startswith("best_ckpt")}
    # An earlier run in the same folder may have saved its own best checkpoint.
    files = [name for name in found if name in best or not name.startswith("best_")]
    logs = Path(runner.log_dir).relative_to(folder)
    return f"Done: {', '.join(results)}. In {folder}: {', '.join(files)}; logs in {logs}/"


def _with_best(name: str, value: float, hub: MessageHub) -> str:
    last = _format(value)
    # CheckpointHook sets this value if it selects the best checkpoint by this metric.
    score = hub.get_info(f"best_score/{name}")
    best = last if score is None else _format(score)
    return f"{name} {last}" if best == last else f"{name} {last} (best {best})"


def _format(value: float) -> str:
    # A value below 1 is probably a fraction, which requires more decimals than a percentage.
    return f"{value:.4f}" if abs(value) < 1 else f"{value:.2f}"
