"""`python -m slipstream.train_from_recipe --config-name=NAME`: SuperGradients' command, with all of Hydra's options.

Hydra reads the words, tries the values of a `--multirun` one after another or through its launchers, and shows the
recipe (`--cfg job`); each run is `slipstream train NAME overrides`.
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
    """Train the recipe that the words `argv` name; return the exit status: 2 for a wrong word, 1 for a failed run.

    Raises:
        SystemExit: Hydra, or a run of several, ends the process.
    """
    from slipstream.errors import ConfigError

    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        print(f"train_from_recipe: error: {error}", file=sys.stderr)
        return 2


def _main(argv: list[str]) -> int:
    from hydra._internal.utils import get_args_parser

    from slipstream.errors import ConfigError
    from slipstream.recipes import find_recipe

    args = get_args_parser().parse_args(argv)
    folder = args.config_dir or args.config_path
    if args.config_name is None and not args.hydra_help:
        raise ConfigError("give a recipe: --config-name=NAME ('slipstream recipes' lists them)")
    if not _hydra_options(args):
        return _train(args.config_name, args.overrides, folder)
    path = find_recipe(args.config_name or "variable_setup", folder)
    if path.suffix != ".yaml":
        raise ConfigError(
            f"Hydra reads .yaml files, not {path}: `slipstream train {path}` trains it", "--config-name"
        )
    _by_hydra(args, path, folder)
    return 0


def _hydra_options(args: argparse.Namespace) -> list[str]:
    """Return the options for which Hydra itself is needed, as words."""
    flags = ("multirun", "help", "hydra_help", "shell_completion")
    given = [f"--{name.replace('_', '-')}" for name in flags if getattr(args, name)]
    given += [f"--{name}={getattr(args, name)}" for name in ("cfg", "info", "package") if getattr(args, name)]
    return [*given, "--resolve"] if given and args.resolve else given


def _train(name: str, overrides: Sequence[str], folder: str | None, work_dir: Path | None = None) -> int:
    from slipstream.cli.main import main as command

    options = {"--config-dir": folder, "--work-dir": work_dir}
    return command(["train", name, *overrides, *(f"{k}={v}" for k, v in options.items() if v is not None)])


def _by_hydra(args: argparse.Namespace, path: Path, folder: str | None) -> None:
    import hydra
    from hydra.core.hydra_config import HydraConfig

    from slipstream.errors import SlipstreamError
    from slipstream.recipes.compose import hydra_overrides
    from slipstream.recipes.resolvers import register_resolvers

    def job(_: DictConfig) -> None:
        run = HydraConfig.get()
        status = _train(
            args.config_name, list(run.overrides.task), folder, Path(run.sweep.dir) / str(run.job.num)
        )
        if status in (1, 2):
            raise SlipstreamError(f"run {run.job.num} failed, as it says above")  # the others are still tried
        if status:
            sys.exit(status)

    words = hydra_overrides(path, args.overrides, folder)
    register_resolvers()
    before, sys.argv = sys.argv, [sys.argv[0], *_hydra_options(args), *words]  # hydra.main reads no others
    try:
        hydra.main(str(path.parent.resolve()), path.stem, version_base="1.3")(job)()
    finally:
        sys.argv = before


if __name__ == "__main__":
    sys.exit(main())
