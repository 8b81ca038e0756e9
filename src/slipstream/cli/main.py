"""The command `slipstream`: parse the words, run the command, say errors in one line."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from slipstream.errors import ConfigError, SlipstreamError, did_you_mean

__all__ = ["main"]

# Kept here, and not asked from slipstream.dist, so that --help need not import torch.
_LAUNCHERS = ("none", "pytorch", "slurm", "mpi")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, with the nearest valid word."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            hint = did_you_mean(str(value), choices)
            name = action.metavar or action.dest
            raise argparse.ArgumentError(None, f"'{value}' is no {name}{hint} (one of {', '.join(choices)})")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return the exit status: 2 for a wrong word, 1 for a failed run."""
    args = _parser().parse_args(argv)
    # Before torch loads OpenMP: threads that wait in sleep cost nothing on an idle machine, and a training that
    # shares its cores with another program is several times faster than with threads that wait by spinning.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    command = importlib.import_module(f"slipstream.cli.{args.command}")
    try:
        status: int = command.run(args)
        return status
    except ConfigError as error:
        return _fail(error, 2)
    except SlipstreamError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        print("interrupted; what was written so far is complete", file=sys.stderr)
        return 130


def _fail(error: SlipstreamError, status: int) -> int:
    notes = " ".join(getattr(error, "__notes__", ()))
    print(f"slipstream: error: {error}{' ' + notes if notes else ''}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="slipstream", description="Train PyTorch models faster without changing their code."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    train = commands.add_parser("train", help="train a recipe or a configuration file")
    _add_run(train)
    train.add_argument("--launcher", default=None, choices=_LAUNCHERS, metavar="LAUNCHER",
                       help="what started the processes: none, pytorch (torchrun), slurm or mpi")  # fmt: skip
    train.add_argument("--resume", nargs="?", const=True, default=None, metavar="CHECKPOINT",
                       help="go on from the work_dir's last checkpoint, or from the one given")  # fmt: skip

    val = commands.add_parser("val", help="validate a checkpoint")
    _add_run(val)
    val.add_argument("--checkpoint", help="by default the last one in the work_dir")

    predict = commands.add_parser("predict", help="write coloured masks of images")
    predict.add_argument("images", nargs="+", metavar="IMAGE", help="image files")
    predict.add_argument("--checkpoint", help="by default the newest under work_dirs/")
    predict.add_argument("--config", help="recipe or file, if the checkpoint does not hold its own")
    predict.add_argument("--out", default="predictions", help="folder for the masks (default: predictions)")

    commands.add_parser("doctor", help="show machine, versions, levers, and what is misconfigured")
    commands.add_parser("recipes", help="list the recipes")
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="RECIPE_OR_CONFIG", help="a recipe's name, or a file")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="dotted keys: train_cfg.max_epochs=3"
    )
    parser.add_argument("--work-dir", help="where everything is written (default: work_dirs/NAME)")


if __name__ == "__main__":
    sys.exit(main())
