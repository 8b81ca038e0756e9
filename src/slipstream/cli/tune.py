"""`slipstream tune`: find the fastest options, a batch size or a learning rate by measuring them."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.cli.configure import configure
from slipstream.cli.processes import interrupt_on_sigterm, launch, needs_launch
from slipstream.errors import ConfigError
from slipstream.recipes import find_recipe

if TYPE_CHECKING:
    from slipstream.config import Config
    from slipstream.tune import Row
    from slipstream.tune.batch_size import BatchSizeRow


def run(args: argparse.Namespace) -> int:
    """Measure the options and write the plan, or find a batch size or learning rate (`--find`). Print the results.

    Return 130 if Ctrl-C or SIGTERM stopped the search.
    """
    from slipstream.tune.api import config_job, parse_budget, tune_config
    from slipstream.tune.lr_range import sweep_lr

    out, seconds = Path(args.out), parse_budget(args.budget)
    if out.suffix not in (".yaml", ".yml") or not out.absolute().parent.is_dir():
        raise ConfigError(f"must be a .yaml file in an existing folder, not '{out}'", "--out")
    if args.find != "batch_size" and (args.nproc is not None or args.launcher not in (None, "none")):
        raise ConfigError("requires `--find batch_size`", "--nproc" if args.nproc else "--launcher")
    cfg = configure(args)
    if needs_launch(args):
        return launch(args, cfg.work_dir)
    with interrupt_on_sigterm():
        if args.find == "batch_size":
            return _find_batch_size(args, cfg, seconds)
        if args.find == "lr":
            lr_range = sweep_lr(config_job(cfg), 1e-7, 1.0, 100, seconds, args.start)
            print(lr_range)
            print(f"Written: {lr_range.plot(out.with_name('lr_range.png'))}")
            return 0
        name = find_recipe(args.config, args.config_dir).stem
        result = tune_config(cfg, seconds, args.options, name, _print_row, args.start)
    print(result)
    result.save(out)
    print(f"Written: {out} and {out.with_suffix('.json')}")
    if result.outcome.adopted:
        command = shlex.join([args.config, *args.overrides, f"+speed={out}"])
        print(f"To train with these options: slipstream train {command}")
    return 130 if result.outcome.stopped == "interrupted" else 0


def _find_batch_size(args: argparse.Namespace, cfg: Config, seconds: float) -> int:
    from slipstream.config import options
    from slipstream.dist import infer_launcher, is_main_process
    from slipstream.runner.environment import EnvOptions, setup_env
    from slipstream.tune.api import config_job
    from slipstream.tune.batch_size import search_batch_sizes

    # A launcher in the configuration applies only if it started this process.
    launcher = args.launcher or (infer_launcher() if cfg.get("launcher") == infer_launcher() else "none")
    setup_env(launcher, options(EnvOptions, cfg.get("env_cfg"), "env_cfg"))
    report = _print_size if is_main_process() else lambda row: None
    sizes = search_batch_sizes(config_job(cfg), args.max_batch_size, seconds, report, args.start)
    if is_main_process():
        print(sizes)
    return 130 if sizes.stopped == "interrupted" else 0


def _print_row(row: Row) -> None:
    ratio = "" if row.estimate is None else f"{row.estimate.ratio:.2f} times as fast as {row.against}, "
    print(f"{row.label}: {ratio}{row.status}{': ' + row.reason if row.reason else ''}", flush=True)


def _print_size(row: BatchSizeRow) -> None:
    rate = "" if row.samples_per_second is None else f"{row.samples_per_second:.4g} samples/s, "
    reason = f": {row.reason}" if row.reason else ""
    print(f"batch size {row.batch_size}: {rate}{row.status}{reason}", flush=True)
