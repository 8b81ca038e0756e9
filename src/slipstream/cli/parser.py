"""The argument parser. It imports no heavy modules, so `--help` is fast."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction["Parser"]

# Copied from `slipstream.dist`, so that --help does not import torch.
_LAUNCHERS = ("none", "pytorch", "slurm", "mpi")


class Parser(argparse.ArgumentParser):
    """A parser that prints errors on one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message on one line, and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def fail_unknown(self, words: Sequence[str], takes_overrides: bool) -> NoReturn:
        """Exit with an error that suggests an option or an override for the first unknown argument."""
        name, _, value = words[0].partition("=")
        near = difflib.get_close_matches(name, self._option_string_actions, n=1, cutoff=0.75)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        if not hint and takes_overrides and name.startswith("--"):
            key = name.strip("-").replace("-", "_")
            hint = f"; recipe values are set without dashes: {key}={value or 'VALUE'}"
        self.error(f"unrecognized arguments: {' '.join(words)}{hint}")

    def option(self, name: str, help: str, **settings: Any) -> None:
        """Add an option; a `metavar` without a `type` or `action` denotes a string."""
        self.add_argument(name, help=help, **settings)

    def number(self, name: str, default: int | None, help: str) -> None:
        """Add an option that is a positive integer."""
        suffix = "" if default is None else f" (default: {default})"
        self.add_argument(name, type=_count, default=default, metavar="N", help=help + suffix)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line.

    The attribute `function` contains the function that runs the command, such as `train.run`.
    """
    parser, commands = build_parser()
    words = list(sys.argv[1:] if argv is None else argv)
    args, rest = parser.parse_known_args(words)
    # argparse reads overrides only up to the next option, and returns later overrides in `rest`.
    overrides = [word for word in rest if "overrides" in args and not word.startswith("-")]
    if unknown := [word for word in rest if word not in overrides]:
        commands.choices[args.command].fail_unknown(unknown, takes_overrides="overrides" in args)
    if overrides:
        args.overrides += overrides
    resume = getattr(args, "resume", None)
    if isinstance(resume, str) and "=" in resume and not Path(resume).exists():
        args.resume = True  # an override, not a checkpoint
        args.overrides.append(resume)
    return args


def build_parser() -> tuple[Parser, _Commands]:
    """Return the main parser and the command parsers."""
    parser = Parser(
        prog="slipstream", description="Train PyTorch models faster without changing their code.",
        epilog="Exit status: 0 success, 1 failure, 2 invalid argument or recipe (docs/command_line.md).",
    )  # fmt: skip
    parser.add_argument("--version", action=_Version, nargs=0, help="show the versions and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add in (_add_project_commands, _add_training_commands, _add_model_commands,
                _add_measuring_commands, _add_data, _add_run_commands, _add_information_commands):  # fmt: skip
        add(commands)
    return parser, commands


class _Version(argparse.Action):
    """Print the versions. Reading the versions takes time, so they are read only when this option is used."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version
        from platform import python_version

        from slipstream.version import __version__

        print(f"slipstream {__version__} (torch {version('torch')}, Python {python_version()})")
        parser.exit()


def _command(commands: _Commands, name: str, function: str, help: str) -> Parser:
    parser = commands.add_parser(name, help=help)
    parser.set_defaults(function=function)
    return parser


def _add_project_commands(commands: _Commands) -> None:
    new = _command(commands, "new", "recipes.new", "create a starter project: a recipe and a dataset")
    new.add_argument("folder", metavar="FOLDER", help="new folder")
    check = _command(
        commands, "check", "check.run", "validate a recipe, and run one training and one validation batch"
    )
    _add_recipe(check)


def _add_training_commands(commands: _Commands) -> None:
    train = _command(commands, "train", "train.run", "train a model from a recipe or a configuration file")
    val = _command(commands, "val", "train.validate", "validate a checkpoint")
    for parser in (train, val):
        _add_recipe(parser)
        _add_work_dir(parser)
        _add_launcher(parser)
        restarts = "with --nproc: resume up to N times after a failure"
        parser.add_argument("--max-restarts", type=_count, default=0, metavar="N", help=restarts)
    train.option("--resume", "resume from CHECKPOINT, or from the last checkpoint in the work_dir",
                 nargs="?", const=True, default=None, metavar="CHECKPOINT")  # fmt: skip
    where = "checkpoint file or folder (default: load_from, or the last one in the work_dir)"
    val.option("--checkpoint", where)


def _add_model_commands(commands: _Commands) -> None:
    predict = _command(commands, "predict", "predict.run", "segment images and videos")
    predict.add_argument("images", nargs="+", metavar="PATH", help="images, videos, folders or patterns")
    newest = "run folder or checkpoint (default: the best checkpoint of the newest run in work_dirs/)"
    predict.option("--checkpoint", newest, metavar="RUN")
    predict.option("--out", "output folder (default: predictions)", default="predictions")
    predict.number("--every", 1, "process every Nth frame of a video")
    export = _command(
        commands, "export", "export.run", "write a trained model in a format that runs without Slipstream"
    )
    export.add_argument("run", metavar="RUN", help="run folder or checkpoint")
    export.option(
        "--to",
        "onnx, torch (torch.export), or safetensors (weights)",
        required=True,
        choices=("onnx", "torch", "safetensors"),
    )
    export.option("--out", "output file (default: next to the checkpoint)", metavar="FILE")
    export.option("--shape", "shape of the example input (default: 256x256 pixels)", type=_shape,
                  metavar="CxHxW")  # fmt: skip
    export.option("--fixed-size", "accept only the height and width of --shape", action="store_true")
    for parser in (predict, export):
        parser.option("--config", "recipe or configuration file (default: the one in the checkpoint)")
        _add_trust(parser)
    consolidate = _command(
        commands, "consolidate", "export.consolidate_folder", "convert a sharded checkpoint into one file"
    )
    consolidate.add_argument("folder", metavar="CHECKPOINT_FOLDER", help="such as epoch_3.sharded")
    consolidate.add_argument("out", nargs="?", metavar="OUT", help="default: epoch_3.pth next to the folder")


def _add_measuring_commands(commands: _Commands) -> None:
    profile = _command(commands, "profile", "profile.run", "profile training steps (docs/profile.md)")
    _add_recipe(profile)
    profile.number("--steps", 5, "steps to record")
    profile.number("--warmup", 5, "untimed steps at the start")
    profile.option("--out", "output folder (default: work_dirs/NAME/profile)", metavar="DIR")
    _add_bench(_command(commands, "bench", "bench.run", "measure training speed (docs/bench.md)"))
    tune = _command(commands, "tune", "tune.run", "find the fastest options by measuring them (docs/tune.md)")
    _add_recipe(tune)
    tune.option("--budget", "time limit, such as 90s or 1h (default: 5m)", default="5m", metavar="TIME")
    tune.option("--options", "options to measure (default: all)", metavar="NAME,NAME,...", type=_words)
    tune.option("--out", "default: tuned.yaml", default="tuned.yaml", metavar="FILE")
    tune.option("--find", "find a batch size or a learning rate instead", choices=("batch_size", "lr"))
    tune.number("--max-batch-size", 1024, "largest batch size to try")
    _add_launcher(tune)
    tune.set_defaults(max_restarts=0)


def _add_bench(parser: Parser) -> None:
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="recipes to measure (default: the five "
                        "street_scenes_* recipes), and key=value overrides for all of them")  # fmt: skip
    parser.option("--against", "compare the step with a hand-written loop and these frameworks: accelerate, "
                  "lightning, mmengine, loop_compiled", type=_words, metavar="NAME,NAME,...")  # fmt: skip
    parser.option("--synthetic", "train on a single batch, without loading data", action="store_true")
    parser.number("--steps", 20, "steps to time")
    parser.number("--warmup", 5, "untimed steps at the start, at least 3")
    parser.option("--mode", "measure only eager or only compiled", choices=("eager", "compiled"))
    parser.option("--precision", "measure only float32 or only AMP", choices=("fp32", "amp"))
    parser.option("--timeout", "time limit in seconds for each run (default: 900)", type=float, default=900.0)
    parser.option("--out", "default: work_dirs/bench", default="work_dirs/bench", metavar="DIR")
    _add_config_dir(parser)
    _add_trust(parser)


def _add_data(commands: _Commands) -> None:
    data = _command(commands, "data", "data.run", "inspect or cache a recipe's data (docs/data.md)")
    actions = data.add_subparsers(dest="action", metavar="ACTION", required=True)
    stats = actions.add_parser("stats", help="show classes, sizes, means and broken files")
    cache = actions.add_parser("cache", help="decode all samples into a verified cache on disk")
    show = actions.add_parser("show", help="write a contact sheet of samples as the network receives them")
    for action in (stats, cache, show):
        _add_recipe(action)
        which = f"train, val or test (default: {'train' if action is show else 'all'})"
        action.option("--split", which, choices=("train", "val", "test"))
    for action in (stats, cache):
        action.number("--workers", None, "processes (default: one per core)")
    _add_json(stats)
    cache.option("--folder", "cache folder (default: the recipe's, or next to the data)")
    show.option("--out", "default: SPLIT_epoch_E.png", metavar="FILE")
    show.number("--count", 8, "number of samples")
    show.option("--epoch", "epoch, starting at 0 (default: 0)", type=int, default=0, metavar="E")


def _add_run_commands(commands: _Commands) -> None:
    runs = _command(commands, "runs", "runs.run", "list the runs in a folder (docs/report.md)")
    runs.add_argument("folder", nargs="?", default="work_dirs", metavar="DIR", help="default: work_dirs")
    runs.option("--sort", "column, scalar (mIoU, mIoU.max) or setting to sort by; KEY- reverses the order "
                "(default: started)", default="started", metavar="KEY")  # fmt: skip
    runs.option("--filter", "show only runs with this value, such as status=failed; repeatable",
                type=_equation, action="append", default=[], metavar="KEY=VALUE")  # fmt: skip
    runs.option("--columns", "additional columns: scalars or settings", type=_words, action="extend",
                default=[], metavar="KEY,KEY,...")  # fmt: skip
    _add_json(runs)
    report = _command(commands, "report", "runs.report", "write the report of a run (docs/report.md)")
    report.add_argument("runs", nargs="+", metavar="RUN", help="run folder, or a work_dir (its newest run)")
    report.option("--out", "HTML file (default: report.html in the run folder)", metavar="FILE")


def _add_information_commands(commands: _Commands) -> None:
    explain = _command(
        commands, "explain", "explain.run", "show a run's options and those not supported on this machine"
    )
    _add_recipe(explain)
    _add_work_dir(explain)
    _add_json(explain)
    doctor = _command(
        commands, "doctor", "doctor.run", "show versions and supported options, and report misconfigurations"
    )
    _add_recipe(doctor, nargs="?")
    recipes = _command(
        commands, "recipes", "recipes.run", "list the recipes, or show one with `recipes show NAME`"
    )
    _add_config_dir(recipes)
    _add_json(recipes)
    actions = recipes.add_subparsers(dest="action", metavar="ACTION")
    show = actions.add_parser("show", help="print the values of a recipe")
    _add_recipe(show)
    _add_json(show)


def _add_recipe(parser: Parser, nargs: str | None = None) -> None:
    parser.add_argument("config", nargs=nargs, metavar="RECIPE_OR_CONFIG",
                        help="recipe name or configuration file")  # fmt: skip
    parser.add_argument("overrides", nargs="*", metavar="key=value",
                        help="values to override, such as train_cfg.max_epochs=3")  # fmt: skip
    parser.set_defaults(work_dir=None)
    _add_config_dir(parser)
    _add_trust(parser)


def _add_config_dir(parser: Parser) -> None:
    parser.option("--config-dir", "folder with your recipes, which take precedence", metavar="FOLDER")


def _add_work_dir(parser: Parser) -> None:
    parser.option("--work-dir", "output folder (default: work_dirs/NAME)")


def _add_json(parser: Parser) -> None:
    parser.option("--json", "print JSON instead of text", action="store_true")


def _add_trust(parser: Parser) -> None:
    text = "allow a YAML, JSON or TOML file to import modules, which executes code"
    parser.option("--trust", text, action="store_const", const=True, default=None)


def _add_launcher(parser: Parser) -> None:
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--nproc", metavar="N", help="start N processes on this machine: a number, gpu (one per "
                       "GPU), auto or cpu")  # fmt: skip
    start.add_argument("--launcher", default=None, choices=_LAUNCHERS,
                       help="launcher that starts the processes; pytorch is torchrun")  # fmt: skip


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive integer")
    return int(text)


def _equation(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"'{text}' must have the form KEY=VALUE, such as status=failed")
    return key, value


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _shape(text: str) -> tuple[int, ...]:
    return tuple(_count(word) for word in text.split("x"))
