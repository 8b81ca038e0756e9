"""`slipstream tune`: find the fastest options for a run by measuring them."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.cli.child import interrupt_on_sigterm
from slipstream.cli.configure import configure
from slipstream.cli.processes import launch, needs_launch
from slipstream.errors import ConfigError
from slipstream.recipes import find_recipe

if TYPE_CHECKING:
    from slipstream.config import Config
    from slipstream.tune import Row
    from slipstream.tune.batch_size import BatchSizeRow

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Measure the options and write the plan, or find a batch size or learning rate (`--find`). Print the results.

    Return 130 if Ctrl-C or SIGTERM stopped the search.
    """
    start: float = args.start
    from slipstream.tune.api import parse_budget

    out = Path(args.out)
    if out.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"must be the path of a .yaml file, not '{out}'", "--out")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"the folder '{out.absolute().parent}' does not exist; create it first", "--out")
    seconds = parse_budget(args.budget)
    if args.find == "batch_size" and out != Path("tuned.yaml"):
        raise ConfigError(
            "is not used with `--find batch_size`, which only prints its result; remove it", "--out"
        )
    if args.find != "batch_size" and (args.nproc is not None or args.launcher not in (None, "none")):
        raise ConfigError("requires `--find batch_size`", "--nproc" if args.nproc else "--launcher")
    cfg = configure(args)
    if needs_launch(args):
        return launch(args, cfg.work_dir)
    with interrupt_on_sigterm():
        if args.find is not None:
            return _find(args, cfg, seconds, start)
        return _tune(args, cfg, seconds, out, start)


def _tune(args: argparse.Namespace, cfg: Config, seconds: float, out: Path, start: float) -> int:
    from slipstream.tune import tune_config

    names = None if args.options is None else [name for name in args.options.split(",") if name]
    name = find_recipe(args.config, args.config_dir).stem
    result = tune_config(cfg, seconds, names, name, cache=not args.no_cache, report=_print_row, start=start)
    print(result)
    result.save(out)
    print(f"Written: {out} and {out.with_suffix('.json')}")
    if result.outcome.adopted:
        command = shlex.join([args.config, *args.overrides, f"+speed={out}"])
        print(f"To train with these options: slipstream train {command}")
    return 130 if result.outcome.stopped == "interrupted" else 0


def _find(args: argparse.Namespace, cfg: Config, seconds: float, start: float) -> int:
    from slipstream.extras import is_installed
    from slipstream.tune.api import config_job
    from slipstream.tune.lr_range import sweep_lr

    if args.find == "batch_size":
        return _find_batch_size(args, cfg, seconds, start)
    lr_range = sweep_lr(config_job(cfg), 1e-7, 1.0, 100, seconds, start)
    print(lr_range)
    if is_installed("matplotlib"):
        print(f"Written: {lr_range.plot(Path(args.out).with_name('lr_range.png'))}")
    return 0


def _find_batch_size(args: argparse.Namespace, cfg: Config, seconds: float, start: float) -> int:
    from slipstream.config import options
    from slipstream.dist import infer_launcher, is_main_process
    from slipstream.runner.environment import EnvOptions, setup_env
    from slipstream.tune.api import config_job
    from slipstream.tune.batch_size import search_batch_sizes

    # A launcher in the configuration applies only if it started this process.
    launcher = args.launcher or (infer_launcher() if cfg.get("launcher") == infer_launcher() else "none")
    setup_env(launcher, options(EnvOptions, cfg.get("env_cfg"), "env_cfg"))
    job, report = config_job(cfg), _print_size if is_main_process() else lambda row: None
    sizes = search_batch_sizes(job, args.max_batch_size, seconds, report, start)
    if is_main_process():
        print(sizes)
    return 130 if sizes.stopped == "interrupted" else 0


def _print_row(row: Row) -> None:
    ratio = ""
    if row.estimate:
        low, high = row.estimate.low, row.estimate.high
        ratio = f"{row.estimate.ratio:.2f} times as fast as {row.reference} ({low:.2f} to {high:.2f}), "
    print(f"{row.label}: {ratio}{row.status}{': ' + row.reason if row.reason else ''}", flush=True)


def _print_size(row: BatchSizeRow) -> None:
    rate = "" if row.samples_per_second is None else f"{row.samples_per_second:.4g} samples/s, "
    print(
        f"batch size {row.batch_size}: {rate}{row.status}{': ' + row.reason if row.reason else ''}",
        flush=True,
    )
