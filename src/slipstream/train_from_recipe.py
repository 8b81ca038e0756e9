"""`python -m slipstream.train_from_recipe --config-name=NAME`: SuperGradients' command, with all Hydra options.

Hydra parses the command line, runs the jobs of a `--multirun` in sequence or with a launcher plugin, and prints the
recipe for `--cfg job`. Each job runs `slipstream train NAME OVERRIDES`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["main"]


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
    folder = args.config_dir or args.config_path
    if args.config_name is None and not args.hydra_help:
        raise ConfigError("no recipe given; add --config-name=NAME ('slipstream recipes' lists all recipes)")
    if not _hydra_options(args):
        return _train(args.config_name, args.overrides, folder, trust)
    path = find_recipe(args.config_name or "variable_setup", folder)
    if path.suffix != ".yaml":
        raise ConfigError(
            f"Hydra reads only .yaml files, not {path}; run `slipstream train {path}` instead",
            "--config-name",
        )
    _run_hydra(args, path, folder, trust)
    return 0


def _hydra_options(args: argparse.Namespace) -> list[str]:
    """Return the command-line options that only Hydra can handle."""
    flags = ("multirun", "help", "hydra_help", "shell_completion")
    options = [f"--{name.replace('_', '-')}" for name in flags if getattr(args, name)]
    options += [
        f"--{name}={getattr(args, name)}" for name in ("cfg", "info", "package") if getattr(args, name)
    ]
    return [*options, "--resolve"] if options and args.resolve else options


def _train(
    name: str, overrides: Sequence[str], folder: str | None, trust: bool, work_dir: Path | None = None
) -> int:
    from slipstream.cli.main import main as command

    options = {"--config-dir": folder, "--work-dir": work_dir}
    arguments = [f"{key}={value}" for key, value in options.items() if value is not None]
    return command(["train", name, *overrides, *arguments, *(["--trust"] if trust else [])])


def _run_hydra(args: argparse.Namespace, path: Path, folder: str | None, trust: bool) -> None:
    import hydra
    from hydra.core.hydra_config import HydraConfig

    from slipstream.errors import SlipstreamError
    from slipstream.recipes.compose import hydra_overrides
    from slipstream.recipes.resolvers import register_resolvers

    def job(_: DictConfig) -> None:
        run = HydraConfig.get()
        work_dir = Path(run.sweep.dir) / str(run.job.num)
        status = _train(args.config_name, list(run.overrides.task), folder, trust, work_dir)
        if status in (1, 2):
            # After this error, Hydra continues with the other runs.
            raise SlipstreamError(f"run {run.job.num} failed; see the error above")
        if status:
            sys.exit(status)

    overrides = hydra_overrides(path, args.overrides, folder, trust)
    register_resolvers()
    # hydra.main reads its arguments only from sys.argv.
    previous_argv, sys.argv = sys.argv, [sys.argv[0], *_hydra_options(args), *overrides]
    try:
        hydra.main(str(path.parent.resolve()), path.stem, version_base="1.3")(job)()
    finally:
        sys.argv = previous_argv


if __name__ == "__main__":
    sys.exit(main())
