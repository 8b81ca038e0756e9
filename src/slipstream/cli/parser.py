"""The words of the command line; imports nothing heavy, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from slipstream.errors import did_you_mean

__all__ = ["parse"]

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction["_Parser"]

# Kept here, and not asked from slipstream.dist, so that --help need not import torch.
_SPLITS = ("train", "val", "test")
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


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what a command line says; `command` names the module of `slipstream.cli` that runs it."""
    parser = _build_parser()
    args, rest = parser.parse_known_args(argv)
    # argparse takes a list of words in one piece, and leaves over those that come after an option.
    overrides = [word for word in rest if "overrides" in args and not word.startswith("-")]
    if unknown := [word for word in rest if word not in overrides]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if overrides:
        args.overrides += overrides
    given = getattr(args, "resume", None)
    if isinstance(given, str) and "=" in given and not Path(given).exists():
        args.resume = True  # an override, not a checkpoint
        args.overrides.append(given)
    return args


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="slipstream", description="Train PyTorch models faster without changing their code."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add in (
        _add_train,
        _add_val,
        _add_predict,
        _add_submit,
        _add_explain,
        _add_data,
        _add_consolidate,
        _add_plan_scale,
    ):
        add(commands)
    commands.add_parser("doctor", help="show machine, versions, options, and what is misconfigured")
    commands.add_parser("recipes", help="list the recipes")
    return parser


def _add_train(commands: _Commands) -> None:
    parser = commands.add_parser("train", help="train a recipe or a configuration file")
    _add_run(parser)
    _add_processes(parser)
    parser.add_argument("--resume", nargs="?", const=True, default=None, metavar="CHECKPOINT",
                        help="go on from the work_dir's last checkpoint, or from the one given")  # fmt: skip


def _add_val(commands: _Commands) -> None:
    parser = commands.add_parser("val", help="validate a checkpoint")
    _add_run(parser)
    _add_processes(parser)
    parser.add_argument("--checkpoint", help="by default the last one in the work_dir")


def _add_predict(commands: _Commands) -> None:
    parser = commands.add_parser("predict", help="write coloured masks of images")
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="image files")
    parser.add_argument("--checkpoint", help="by default the newest under work_dirs/")
    parser.add_argument("--config", help="recipe or file, if the checkpoint does not hold its own")
    parser.add_argument("--out", default="predictions", help="folder for the masks (default: predictions)")


def _add_submit(commands: _Commands) -> None:
    parser = commands.add_parser("submit", help="train on a Slurm cluster")
    _add_run(parser)
    parser.add_argument("--nodes", type=_count, default=1, metavar="N", help="machines (default: 1)")
    tasks = parser.add_mutually_exclusive_group()
    tasks.add_argument("--gpus-per-node", type=_gpus, metavar="[TYPE:]N", help="one process for each GPU")
    tasks.add_argument("--tasks-per-node", type=_count, default=1, metavar="N",
                       help="processes on each machine, without GPUs (default: 1)")  # fmt: skip
    parser.add_argument("--cpus-per-task", type=_count, metavar="N", help="cores for each process")
    for option in ("partition", "account", "qos", "job-name", "mem"):
        parser.add_argument(f"--{option}", type=_one_line, help=f"sbatch's --{option}")
    parser.add_argument("--time", type=_slurm_time, help="time limit: minutes, H:MM:SS or D-HH:MM:SS")
    parser.add_argument("--requeue", action="store_true",
                        help="queue the job again when it is preempted or at its time limit, to go on")  # fmt: skip
    parser.add_argument("--sbatch", type=_one_line, action="append", default=[], metavar="OPTION",
                        help="any other option of sbatch: --sbatch=--constraint=a100; repeatable")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print the batch file, and do nothing")


def _add_plan_scale(commands: _Commands) -> None:
    parser = commands.add_parser("plan-scale", help="predict step times on 8 to 4,096 GPUs (docs/scaling.md)")
    parser.add_argument("model", nargs="?", default="pp_lite_t_seg", metavar="RECIPE_OR_NETWORK",
                        help="a recipe, a configuration file, a network, or segformer_1b")  # fmt: skip
    parser.add_argument("--gpus", type=_counts, default=[8, 64, 512, 4096], metavar="N,N,...",
                        help="default: 8,64,512,4096")  # fmt: skip
    parser.add_argument("--gpus-per-node", type=_count, default=8, metavar="N", help="default: 8")
    parser.add_argument("--batch-per-gpu", type=_count, metavar="N", help="default: the recipe's, else 8")
    parser.add_argument(
        "--size", type=_size, metavar="HxW", help="pixels; default: the recipe's, else 768x768"
    )
    parser.add_argument("--gpu", default="h100", help="v100, a100, h100 (default), h200 or rtx4090")
    parser.add_argument("--network", default="ib400", help="ib400 (default), ib200, eth100 or eth25")
    parser.add_argument("--step-time", type=_seconds, metavar="SECONDS",
                        help="of one GPU with this batch, as measured; else it is estimated")  # fmt: skip
    parser.add_argument(
        "--no-sync-bn", action="store_true", help="let each GPU keep its own BatchNorm statistics"
    )
    parser.add_argument("--json", action="store_true", help="print all numbers, in seconds and bytes")


def _add_explain(commands: _Commands) -> None:
    parser = commands.add_parser("explain", help="show a run's options, and what this machine cannot do")
    _add_run(parser)


def _add_data(commands: _Commands) -> None:
    parser = commands.add_parser("data", help="look at a recipe's data, or decode them once (docs/data.md)")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    stats = actions.add_parser("stats", help="classes, sizes, means, broken files, seconds a sample")
    cache = actions.add_parser("cache", help="decode all samples into a cache on disk, and verify it")
    show = actions.add_parser("show", help="draw a contact sheet of samples as the network gets them")
    for action in (stats, cache, show):
        _add_recipe(action)
        action.set_defaults(work_dir=None)
        which = "train" if action is show else "all"
        action.add_argument("--split", choices=_SPLITS, metavar="SPLIT",
                            help=f"train, val or test (default: {which})")  # fmt: skip
    for action in (stats, cache):
        action.add_argument("--workers", type=_count, metavar="N", help="processes (default: one a core)")
    stats.add_argument("--json", action="store_true", help="print all numbers")
    cache.add_argument("--folder", help="where to (default: the recipe's, else beside the data)")
    cache.add_argument("--prune", action="store_true", help="then remove all that is not of this recipe")
    show.add_argument("--out", metavar="FILE", help="default: SPLIT_epoch_E.png")
    show.add_argument("--count", type=_count, default=8, metavar="N", help="samples (default: 8)")
    show.add_argument("--epoch", type=int, default=0, metavar="E", help="from 0 (default: 0)")


def _add_consolidate(commands: _Commands) -> None:
    parser = commands.add_parser("consolidate", help="make one file of a sharded checkpoint")
    parser.add_argument("folder", metavar="CHECKPOINT_FOLDER", help="the folder, such as epoch_3.sharded")
    parser.add_argument("out", nargs="?", metavar="OUT", help="the file (default: beside it, epoch_3.pth)")


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="RECIPE_OR_CONFIG", help="a recipe's name, or a file")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="dotted keys: train_cfg.max_epochs=3"
    )
    parser.add_argument(
        "--config-dir", metavar="FOLDER", help="of your own recipes, beside those that are here"
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    _add_recipe(parser)
    parser.add_argument("--work-dir", help="where everything is written (default: work_dirs/NAME)")


def _add_processes(parser: argparse.ArgumentParser) -> None:
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--nproc", metavar="N",
                       help="start N processes on this machine; gpu: one for each GPU; auto, cpu")  # fmt: skip
    start.add_argument("--launcher", default=None, choices=_LAUNCHERS, metavar="LAUNCHER",
                       help="what started the processes: none, pytorch (torchrun), slurm or mpi")  # fmt: skip
    parser.add_argument("--max-restarts", type=_count, default=0, metavar="N",
                        help="with --nproc: after a failure go on from the last checkpoint, N times")  # fmt: skip


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no number from 1")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(word) for word in text.split(",")]


def _size(text: str) -> tuple[int, int]:
    height, x, width = text.partition("x")
    if not x:
        raise argparse.ArgumentTypeError(f"'{text}' is no size: height x width in pixels, as in 512x1024")
    return _count(height), _count(width)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is no positive number of seconds")
    return seconds


def _gpus(text: str) -> str:
    if not re.fullmatch(r"([\w.-]+:)?0*[1-9]\d*", text, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"'{text}' is no number of GPUs: 8 or a100:8 (without GPUs: --tasks-per-node)"
        )
    return text


def _slurm_time(text: str) -> str:
    if not re.fullmatch(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|infinite|unlimited", text.lower(), re.ASCII):
        raise argparse.ArgumentTypeError(
            f"'{text}' is no time limit of Slurm: minutes, hours:minutes:seconds or days-hours:minutes:seconds"
        )
    return text


def _one_line(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is empty, or has more than one line")
    return text
