"""`python -m slipstream.train_from_recipe --config-name=NAME`: SuperGradients' command, with all Hydra options.

Each run is the same as `slipstream train NAME OVERRIDES`. With `--multirun`, Hydra runs the jobs in sequence or with a
launcher plugin, and a sweeper plugin, such as Optuna's, receives the best value of the watched metric.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omegaconf import DictConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe specified in `argv` and return the exit status: 2 for a usage error, 1 for a failed run.

    Raises:
        SystemExit: if Hydra or a multirun job exits.
    """
    from slipstream.errors import ConfigError, MissingPackageError

    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except (ConfigError, MissingPackageError) as error:
        print(f"train_from_recipe: error: {error}", file=sys.stderr)
        return 2


def _main(argv: list[str]) -> int:
    from slipstream.errors import ConfigError
    from slipstream.extras import extra
    from slipstream.recipes import find_recipe

    with extra("recipes"):
        from hydra._internal.utils import get_args_parser

    trust = "--trust" in argv  # removed below, because Hydra does not support this option
    args = get_args_parser().parse_args([word for word in argv if word != "--trust"])
    if args.config_name is None and not args.hydra_help:
        raise ConfigError("no recipe given; add --config-name=NAME ('slipstream recipes' lists all recipes)")
    if not _hydra_options(args):
        return _train(args, args.overrides, trust)
    path = find_recipe(args.config_name or "variable_setup", args.config_dir or args.config_path)
    if path.suffix != ".yaml":
        raise ConfigError(f"Hydra reads only .yaml files; run `slipstream train {path}`", "--config-name")
    _run_hydra(args, path, trust)
    return 0


def _hydra_options(args: argparse.Namespace) -> list[str]:
    """Return the command-line options that only Hydra can handle."""
    flags = ("multirun", "help", "hydra_help", "shell_completion")
    options = [f"--{name.replace('_', '-')}" for name in flags if getattr(args, name)]
    options += [f"--{key}={value}" for key in ("cfg", "info", "package") if (value := getattr(args, key))]
    return [*options, "--resolve"] if options and args.resolve else options


def _train(
    args: argparse.Namespace, overrides: Sequence[str], trust: bool, work_dir: Path | None = None
) -> int:
    from slipstream.cli.main import main as command

    options = {"--config-dir": args.config_dir or args.config_path, "--work-dir": work_dir}
    words = [f"{key}={value}" for key, value in options.items() if value is not None]
    return command(["train", args.config_name, *overrides, *words, *(["--trust"] if trust else [])])


def _run_hydra(args: argparse.Namespace, path: Path, trust: bool) -> None:
    import hydra
    from hydra.core.hydra_config import HydraConfig

    from slipstream.errors import SlipstreamError
    from slipstream.recipes.compose import hydra_overrides, register_resolvers

    def job(_: DictConfig) -> float | None:
        run = HydraConfig.get()
        work_dir, overrides = Path(run.sweep.dir) / str(run.job.num), list(run.overrides.task)
        status = _train(args, overrides, trust, work_dir)
        if status in (1, 2):
            # After this error, Hydra continues with the other runs.
            raise SlipstreamError(f"run {run.job.num} failed; see the error above")
        if status:
            sys.exit(status)
        return best_value(args.config_name, overrides, args.config_dir or args.config_path, work_dir)

    overrides = hydra_overrides(path, args.overrides, args.config_dir or args.config_path, trust)
    register_resolvers()
    # hydra.main reads its arguments only from sys.argv.
    previous_argv, sys.argv = sys.argv, [sys.argv[0], *_hydra_options(args), *overrides]
    try:
        hydra.main(str(path.parent.resolve()), path.stem, version_base="1.3")(job)()
    finally:
        sys.argv = previous_argv


def best_value(name: str, overrides: Sequence[str], config_dir: str | None, work_dir: Path) -> float | None:
    """Return the best value of the metric that selects the best checkpoint; None if it has no value, name or rule.

    The values are read from the run's JSON log, because the run may have been several processes.
    """
    from slipstream.cli.configure import load_config
    from slipstream.hooks.schedule import implied_rule
    from slipstream.typecheck import matches

    hooks = load_config(name, overrides, config_dir).cfg.get("default_hooks") or {}
    checkpoint = hooks.get("checkpoint") or {}
    monitors = checkpoint.get("save_best") or ""
    metric = (monitors if isinstance(monitors, str) else monitors[0]).removeprefix("val/")
    rule = checkpoint.get("rule") or implied_rule(metric)
    values = []
    for log in work_dir.glob("*/vis_data/scalars.json"):
        entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        # The name has a prefix if training records a scalar of the same name; only the lines of training have "iter".
        found = [entry.get(f"val/{metric}", entry.get(metric)) for entry in entries if "iter" not in entry]
        values += [value for value in found if matches(value, float)]
    best = min if rule == "less" else max
    return float(best(values)) if values and rule else None


if __name__ == "__main__":
    sys.exit(main())
