"""The argument parser. It imports no heavy modules, so `--help` is fast."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from slipstream.errors import did_you_mean

__all__ = ["Parser", "build_parser", "parse"]

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction["Parser"]

# Copied from `cli.data_parts` and `slipstream.dist`, so that --help does not import torch.
_SPLITS = ("train", "val", "test")
_LAUNCHERS = ("none", "pytorch", "slurm", "mpi")


class Parser(argparse.ArgumentParser):
    """A parser that prints errors on one line and suggests the nearest valid value."""

    def error(self, message: str) -> NoReturn:
        """Print the message on one line, and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def options(self) -> dict[str, str]:
        """Return the long options and their help texts."""
        options = {}
        for action in self._actions:
            names = [name for name in action.option_strings if name.startswith("--")]
            options.update({name: action.help or "" for name in names if action.help != argparse.SUPPRESS})
        return options

    @property
    def takes_recipe(self) -> bool:
        """Whether the command accepts a recipe name."""
        return any("RECIPE" in str(action.metavar) for action in self._actions)

    def fail_unknown(self, words: Sequence[str], takes_overrides: bool) -> NoReturn:
        """Exit with an error that lists the unknown arguments and suggests an option or override for the first one."""
        name, equals, value = words[0].partition("=")
        near = difflib.get_close_matches(name, self.options(), n=1, cutoff=0.75)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        if not hint and takes_overrides and name.startswith("--"):
            key = name.strip("-").replace("-", "_")
            hint = f"; recipe values are set without dashes: {key}={value if equals else 'VALUE'}"
        self.error(f"unrecognized arguments: {' '.join(words)}{hint}")

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            hint = did_you_mean(str(value), choices)
            name = action.metavar or action.dest
            raise argparse.ArgumentError(
                None, f"'{value}' is not a valid {name}{hint} (choose from {', '.join(choices)})"
            )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line. The attribute `command` contains the name of the command."""
    parser, commands = build_parser()
    args, rest = parser.parse_known_args(argv)
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
    for add in (
        _add_new,
        _add_train,
        _add_check,
        _add_val,
        _add_predict,
        _add_export,
        _add_submit,
        _add_explain,
        _add_profile,
        _add_bench,
        _add_compare,
        _add_tune,
        _add_data,
        _add_consolidate,
        _add_runs,
        _add_report,
    ):
        add(commands)
    doctor = commands.add_parser(
        "doctor", help="show the installed versions and supported options, and report misconfigurations"
    )
    _add_recipe(doctor, nargs="?")
    _add_json(doctor)
    _add_recipes(commands)
    completion = commands.add_parser("completion", help="print a shell completion script")
    completion.add_argument(
        "shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish"
    )
    return parser, commands


class _Version(argparse.Action):
    """Print the versions. Reading the versions takes time, so they are read only when this option is used."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version
        from platform import python_version

        from slipstream.version import __version__

        print(f"slipstream {__version__} (torch {version('torch')}, Python {python_version()})")
        parser.exit()


def _add_recipes(commands: _Commands) -> None:
    text = "list the recipes, or show one with `recipes show NAME` (docs/command_line.md)"
    parser = commands.add_parser("recipes", help=text)
    parser.add_argument("--config-dir", metavar="FOLDER", help="folder with your recipes")
    _add_json(parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    show = actions.add_parser("show", help="print the values of a recipe")
    _add_recipe(show)
    _add_json(show)


def _add_check(commands: _Commands) -> None:
    parser = commands.add_parser(
        "check", help="validate a recipe, and run one training batch and one validation batch"
    )
    _add_recipe(parser)
    parser.set_defaults(work_dir=None)
    _add_json(parser)


def _add_new(commands: _Commands) -> None:
    parser = commands.add_parser(
        "new", help="create a starter project: a recipe and a dataset that you can modify"
    )
    parser.add_argument("folder", metavar="FOLDER", help="new folder")


def _add_train(commands: _Commands) -> None:
    parser = commands.add_parser("train", help="train a model from a recipe or a configuration file")
    _add_run(parser)
    _add_processes(parser)
    parser.add_argument("--resume", nargs="?", const=True, default=None, metavar="CHECKPOINT",
                        help="resume from CHECKPOINT, or from the last checkpoint in the work_dir")  # fmt: skip
    parser.add_argument("--sweep", action="append", default=[], metavar="key=value,value,...",
                        help="train once per value, sequentially; repeat the option for combinations")  # fmt: skip
    parser.add_argument("--multirun", action="store_true",
                        help="apply --sweep to each override that lists several values (Hydra's syntax)")  # fmt: skip
    parser.add_argument("--result", help=argparse.SUPPRESS)  # file for the metrics of a run in a sweep


def _add_val(commands: _Commands) -> None:
    parser = commands.add_parser("val", help="validate a checkpoint")
    _add_run(parser)
    _add_processes(parser)
    parser.add_argument(
        "--checkpoint", help="checkpoint file or folder (default: load_from, or the last one in the work_dir)"
    )


def _add_predict(commands: _Commands) -> None:
    parser = commands.add_parser(
        "predict", help="write class masks and overlays for images and videos (docs/command_line.md)"
    )
    parser.add_argument("images", nargs="+", metavar="PATH", help="images, videos, folders or patterns")
    _add_checkpoint(parser, "--checkpoint")
    parser.add_argument("--out", default="predictions", help="output folder (default: predictions)")
    parser.add_argument("--every", type=_count, default=1, metavar="N",
                        help="process every Nth frame of a video (default: 1)")  # fmt: skip
    parser.add_argument("--max-pixels", type=_count, metavar="N",
                        help="maximum number of pixels in an image (default: 178,956,970)")  # fmt: skip
    _add_json(parser)


def _add_export(commands: _Commands) -> None:
    parser = commands.add_parser(
        "export", help="write a trained model in a format that runs without Slipstream (docs/command_line.md)"
    )
    _add_checkpoint(parser, "run")
    parser.add_argument("--to", required=True, choices=("onnx", "torch", "torchscript", "openvino"), metavar="FORMAT",
                        help="onnx, torch (torch.export), torchscript or openvino")  # fmt: skip
    parser.add_argument("--out", metavar="FILE", help="output file (default: next to the checkpoint)")
    parser.add_argument("--shape", type=_shape, metavar="CxHxW",
                        help="shape of the example input (default: 256x256 pixels)")  # fmt: skip
    parser.add_argument(
        "--fixed-size", action="store_true", help="accept only the height and width of --shape"
    )


def _add_checkpoint(parser: argparse.ArgumentParser, name: str) -> None:
    default = (
        " (default: the best checkpoint of the newest run in work_dirs/)" if name.startswith("-") else ""
    )
    parser.add_argument(name, metavar="RUN", help=f"run folder or checkpoint{default}")
    parser.add_argument(
        "--config", help="recipe or configuration file (default: the configuration in the checkpoint)"
    )
    _add_trust(parser)


def _add_submit(commands: _Commands) -> None:
    parser = commands.add_parser("submit", help="train on a cluster (docs/distributed.md)")
    _add_run(parser)
    parser.add_argument("--to", default="slurm", choices=("slurm", "kubernetes", "ray"), metavar="CLUSTER",
                        help="slurm (default), kubernetes or ray")  # fmt: skip
    parser.add_argument("--nodes", type=_count, default=1, metavar="N", help="number of nodes (default: 1)")
    tasks = parser.add_mutually_exclusive_group()
    tasks.add_argument("--gpus-per-node", type=_gpus, metavar="[TYPE:]N",
                       help="GPUs per node, with one process per GPU; TYPE is a resource such as amd.com/gpu in "
                            "Kubernetes, and a GPU name such as A100 in Ray")  # fmt: skip
    tasks.add_argument("--tasks-per-node", type=_count, default=1, metavar="N",
                       help="processes per node, without GPUs (default: 1)")  # fmt: skip
    parser.add_argument("--cpus-per-task", type=_count, metavar="N", help="cores per process")
    parser.add_argument(
        "--mem", type=_one_line, help="memory per node: sbatch's --mem, or a quantity such as 64Gi"
    )
    parser.add_argument("--job-name", type=_one_line, metavar="NAME", help="default: the recipe's name")
    parser.add_argument("--env", type=_equation, action="append", default=[], metavar="NAME=VALUE",
                        help="environment variable in Kubernetes or Ray; repeatable")  # fmt: skip
    slurm = parser.add_argument_group("Slurm")
    for option in ("partition", "account", "qos"):
        slurm.add_argument(f"--{option}", type=_one_line, help=f"sbatch's --{option}")
    slurm.add_argument("--time", type=_slurm_time, help="time limit: minutes, H:MM:SS or D-HH:MM:SS")
    slurm.add_argument("--requeue", action="store_true",
                       help="requeue and resume the job on preemption or at its time limit")  # fmt: skip
    slurm.add_argument("--sbatch", type=_one_line, action="append", default=[], metavar="OPTION",
                       help="any other sbatch option, such as --sbatch=--constraint=a100; repeatable")  # fmt: skip
    slurm.add_argument("--dry-run", action="store_true", help="print the batch script without submitting it")
    _add_kubernetes(parser.add_argument_group("Kubernetes"))
    ray = parser.add_argument_group("Ray")
    ray.add_argument("--address", type=_one_line, metavar="HOST:PORT",
                     help="cluster address (default: RAY_ADDRESS, or the cluster on this machine)")  # fmt: skip


def _add_kubernetes(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--api", choices=("v1", "v2"), metavar="VERSION",
                       help="v1 (default): PyTorchJob; v2: TrainJob of Kubeflow Trainer")  # fmt: skip
    group.add_argument("--runtime", type=_one_line, metavar="NAME",
                       help="training runtime of a TrainJob (default: torch-distributed)")  # fmt: skip
    group.add_argument("--image", type=_one_line, help="container image with Python and Slipstream")
    group.add_argument("--volume", type=_one_line, action="append", default=[], metavar="CLAIM:PATH",
                       help="PersistentVolumeClaim to mount; repeatable. A relative work_dir is resolved against "
                            "the first PATH")  # fmt: skip
    group.add_argument("--secret", type=_one_line, action="append", default=[], metavar="NAME",
                       help="Secret whose keys become environment variables; repeatable")  # fmt: skip
    group.add_argument(
        "--namespace", type=_one_line, help="default: the namespace in which you create the job"
    )
    group.add_argument("--shm-size", type=_one_line, metavar="SIZE",
                       help="size limit of /dev/shm, such as 16Gi (default: the pod's memory)")  # fmt: skip
    group.add_argument("--grace-period", type=_count, metavar="SECONDS",
                       help="time to save the state before an evicted pod is killed (default: 120)")  # fmt: skip
    group.add_argument("--out", metavar="FILE", help="write the manifest to this file instead of printing it")


def _add_explain(commands: _Commands) -> None:
    parser = commands.add_parser(
        "explain", help="show the options that a run uses and those that this machine does not support"
    )
    _add_run(parser)
    _add_json(parser)


def _add_profile(commands: _Commands) -> None:
    parser = commands.add_parser("profile", help="profile training steps (docs/profile.md)")
    _add_recipe(parser)
    parser.add_argument("--steps", type=_count, default=5, metavar="N", help="steps to record (default: 5)")
    parser.add_argument(
        "--warmup", type=_count, default=5, metavar="N", help="untimed steps at the start (default: 5)"
    )
    parser.add_argument("--stacks", action="store_true", help="record Python stacks (slows down the steps)")
    parser.add_argument("--out", metavar="DIR", help="output folder (default: work_dirs/NAME/profile)")
    parser.set_defaults(work_dir=None)


def _add_bench(commands: _Commands) -> None:
    parser = commands.add_parser("bench", help="measure training speed (docs/bench.md)")
    parser.add_argument("recipes", nargs="*", metavar="RECIPE",
                        help="recipes to measure (default: the five street_scenes_* recipes)")  # fmt: skip
    parser.add_argument(
        "--synthetic", action="store_true", help="train on a single batch, without loading data"
    )
    parser.add_argument("--steps", type=_count, default=20, metavar="N", help="steps to time (default: 20)")
    parser.add_argument("--warmup", type=_count, default=5, metavar="N",
                        help="untimed steps at the start, at least 3 (default: 5)")  # fmt: skip
    parser.add_argument(
        "--batch-size", type=_count, metavar="N", help="samples per process (default: the recipe's)"
    )
    parser.add_argument(
        "--size", type=_size, metavar="HxW", help="size of generated images (default: the recipe's)"
    )
    parser.add_argument(
        "--mode", choices=("eager", "compiled"), metavar="MODE", help="measure only eager or only compiled"
    )
    parser.add_argument(
        "--devices",
        type=int,
        choices=(1, 2),
        metavar="N",
        help="measure only with this number of devices: 1 or 2",
    )
    parser.add_argument(
        "--precision", choices=("float32", "amp"), metavar="P", help="measure only float32 or only amp"
    )
    parser.add_argument(
        "--averaging",
        choices=("off", "on"),
        metavar="A",
        help="measure only with SyncBN and EMA disabled (off) or enabled (on)",
    )
    parser.add_argument("--timeout", type=_seconds, default=900.0, metavar="SECONDS",
                        help="time limit for each run (default: 900)")  # fmt: skip
    parser.add_argument("--out", default="work_dirs/bench", metavar="DIR", help="default: work_dirs/bench")
    parser.add_argument("--config-dir", metavar="FOLDER", help="folder with your recipes")
    _add_trust(parser)


def _add_compare(commands: _Commands) -> None:
    parser = commands.add_parser(
        "compare", help="compare the training step with other frameworks (docs/compare.md)"
    )
    parser.add_argument("model", nargs="?", default="street_scenes_pp_lite_t", metavar="RECIPE_OR_NETWORK",
                        help="recipe, configuration file or network (default: street_scenes_pp_lite_t)")  # fmt: skip
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe values to override")
    parser.add_argument("--config-dir", metavar="FOLDER", help="folder with your recipes")
    _add_trust(parser)
    parser.add_argument("--steps", type=_count, default=10, metavar="N",
                        help="timed steps per round (default: 10)")  # fmt: skip
    parser.add_argument("--rounds", type=_count, default=9, metavar="R",
                        help="number of rounds (default: 9)")  # fmt: skip
    parser.add_argument("--with", dest="contenders", type=_words, metavar="NAME,NAME,...",
                        help="contenders in addition to loop and slipstream: accelerate, lightning, mmengine, "
                             "loop_compiled, slipstream_auto, slipstream_compiled (default: all)")  # fmt: skip
    parser.add_argument("--size", type=_size, default=(128, 256), metavar="HxW",
                        help="image size for a network (default: 128x256)")  # fmt: skip
    parser.add_argument("--batch-size", type=_count, default=4, metavar="N",
                        help="batch size for a network (default: 4)")  # fmt: skip
    parser.add_argument("--timeout", type=_seconds, default=900.0, metavar="SECONDS",
                        help="time limit for a contender's startup and for each round (default: 900)")  # fmt: skip
    parser.add_argument(
        "--out", default="work_dirs/compare", metavar="DIR", help="default: work_dirs/compare"
    )


def _add_tune(commands: _Commands) -> None:
    parser = commands.add_parser("tune", help="find the fastest options by measuring them (docs/tune.md)")
    _add_recipe(parser)
    parser.set_defaults(work_dir=None)
    parser.add_argument(
        "--budget", default="5m", metavar="TIME", help="time limit, such as 90s or 1h (default: 5m)"
    )
    parser.add_argument("--options", metavar="NAME,NAME,...", help="options to measure (default: all)")
    parser.add_argument("--out", default="tuned.yaml", metavar="FILE", help="default: tuned.yaml")
    parser.add_argument("--no-cache", action="store_true", help="measure again, even if a result is stored")
    parser.add_argument("--find", choices=("batch_size", "lr"), metavar="WHAT",
                        help="find a batch size (batch_size) or a learning rate (lr) instead")  # fmt: skip
    parser.add_argument("--max-batch-size", type=_count, default=1024, metavar="N",
                        help="largest batch size to try (default: 1024)")  # fmt: skip
    _add_launcher(parser)
    parser.set_defaults(max_restarts=0)


def _add_data(commands: _Commands) -> None:
    parser = commands.add_parser("data", help="inspect or cache a recipe's data (docs/data.md)")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    stats = actions.add_parser("stats", help="show classes, sizes, means, broken files and loading times")
    cache = actions.add_parser("cache", help="decode all samples into a verified cache on disk")
    show = actions.add_parser("show", help="write a contact sheet of samples as the network receives them")
    for action in (stats, cache, show):
        _add_recipe(action)
        action.set_defaults(work_dir=None)
        which = "train" if action is show else "all"
        action.add_argument("--split", choices=_SPLITS, metavar="SPLIT",
                            help=f"train, val or test (default: {which})")  # fmt: skip
    for action in (stats, cache):
        action.add_argument("--workers", type=_count, metavar="N", help="processes (default: one per core)")
    stats.add_argument("--json", action="store_true", help="print all numbers as JSON")
    cache.add_argument("--folder", help="cache folder (default: the recipe's, or next to the data)")
    cache.add_argument(
        "--prune", action="store_true", help="remove cached files that the recipe does not use"
    )
    show.add_argument("--out", metavar="FILE", help="default: SPLIT_epoch_E.png")
    show.add_argument("--count", type=_count, default=8, metavar="N", help="number of samples (default: 8)")
    show.add_argument("--epoch", type=int, default=0, metavar="E", help="epoch, starting at 0 (default: 0)")


def _add_consolidate(commands: _Commands) -> None:
    parser = commands.add_parser("consolidate", help="convert a sharded checkpoint into a single file")
    parser.add_argument("folder", metavar="CHECKPOINT_FOLDER", help="the folder, such as epoch_3.sharded")
    parser.add_argument(
        "out", nargs="?", metavar="OUT", help="output file (default: epoch_3.pth next to the folder)"
    )


def _add_runs(commands: _Commands) -> None:
    parser = commands.add_parser("runs", help="list the runs in a folder (docs/report.md)")
    parser.add_argument("folder", nargs="?", default="work_dirs", metavar="DIR", help="default: work_dirs")
    parser.add_argument("--sort", default="started", metavar="KEY",
                        help="column, scalar (mIoU, mIoU.max) or setting to sort by; KEY- reverses the order "
                             "(default: started)")  # fmt: skip
    parser.add_argument("--filter", type=_equation, action="append", default=[], metavar="KEY=VALUE",
                        help="show only runs with this value, such as status=failed; repeatable")  # fmt: skip
    parser.add_argument("--columns", type=_words, action="extend", default=[], metavar="KEY,KEY,...",
                        help="additional columns: scalars or settings")  # fmt: skip
    _add_json(parser)


def _add_report(commands: _Commands) -> None:
    parser = commands.add_parser("report", help="write the report of a run (docs/report.md)")
    parser.add_argument("runs", nargs="+", metavar="RUN",
                        help="run folder, or a work_dir (its newest run is used)")  # fmt: skip
    parser.add_argument("--out", metavar="FILE", help="HTML file (default: report.html in the run folder)")


def _add_recipe(parser: argparse.ArgumentParser, nargs: Literal["?"] | None = None) -> None:
    parser.add_argument("config", nargs=nargs, metavar="RECIPE_OR_CONFIG",
                        help="recipe name or configuration file")  # fmt: skip
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="values to override, such as train_cfg.max_epochs=3"
    )
    parser.add_argument(
        "--config-dir",
        metavar="FOLDER",
        help="folder with your recipes, which take precedence over built-in recipes",
    )
    _add_trust(parser)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _add_trust(parser: argparse.ArgumentParser) -> None:
    # With the default None, `command_args` omits the option.
    parser.add_argument("--trust", action="store_const", const=True, default=None,
                        help="allow a YAML, JSON or TOML file to import modules, which executes code")  # fmt: skip


def _add_run(parser: argparse.ArgumentParser) -> None:
    _add_recipe(parser)
    parser.add_argument("--work-dir", help="output folder (default: work_dirs/NAME)")


def _add_processes(parser: argparse.ArgumentParser) -> None:
    _add_launcher(parser)
    parser.add_argument("--max-restarts", type=_count, default=0, metavar="N",
                        help="with --nproc: resume up to N times after a failure")  # fmt: skip


def _add_launcher(parser: argparse.ArgumentParser) -> None:
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--nproc", metavar="N",
                       help="start N processes on this machine: a number, gpu (one per GPU), auto or cpu")  # fmt: skip
    start.add_argument("--launcher", default=None, choices=_LAUNCHERS, metavar="LAUNCHER",
                       help="launcher that starts the processes: none, pytorch (torchrun), slurm or mpi")  # fmt: skip


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive integer")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(word) for word in text.split(",")]


def _equation(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"'{text}' must have the form KEY=VALUE, such as status=failed")
    return key, value


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _size(text: str) -> tuple[int, int]:
    height, x, width = text.partition("x")
    if not x:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a size; use HEIGHTxWIDTH in pixels, such as 512x1024"
        )
    return _count(height), _count(width)


def _shape(text: str) -> tuple[int, ...]:
    return tuple(_count(word) for word in text.split("x"))


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number of seconds")
    return seconds


def _gpus(text: str) -> str:
    if not re.fullmatch(r"([\w./-]+:)?0*[1-9]\d*", text, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"'{text}' must be N or TYPE:N, such as 8 or a100:8; to train without GPUs, use --tasks-per-node"
        )
    return text


def _slurm_time(text: str) -> str:
    if not re.fullmatch(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|infinite|unlimited", text.lower(), re.ASCII):
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a Slurm time limit; use minutes, hours:minutes:seconds or days-hours:minutes:seconds"
        )
    return text


def _one_line(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} must be one non-empty line of printable characters")
    return text
