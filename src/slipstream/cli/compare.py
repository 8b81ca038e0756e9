"""`slipstream compare`: time the training step of a hand-written loop, Slipstream and other frameworks."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.child import interrupt_on_sigterm
from slipstream.cli.configure import load_config
from slipstream.cli.profile import prepare_output_folder
from slipstream.cli.tables import print_table
from slipstream.cores import cores, cpu_name
from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.recipes import recipes

if TYPE_CHECKING:
    from slipstream.compare import Subject

__all__ = ["run"]

_PEERS = ("accelerate", "lightning", "mmengine")


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, and write the files.

    Returns:
        0 if all installed contenders were measured with equal losses, 1 otherwise, and 130 after Ctrl-C or SIGTERM.

    Raises:
        ConfigError: a name is unknown, or the output folder is not writable.
        SlipstreamError: the hand-written loop cannot be measured.
    """
    from slipstream.compare import CONTENDERS, compare
    from slipstream.compare.result import HEADER, rows, write

    names = list(CONTENDERS) if args.contenders is None else args.contenders
    for name in names:
        if name not in CONTENDERS:
            raise UnknownNameError(
                f"'{name}' is not a contender{did_you_mean(name, CONTENDERS)} (choose from {', '.join(CONTENDERS)})",
                "--with",
            )
    names += [name for name in ("loop", "slipstream") if name not in names]
    out, subject = prepare_output_folder(Path(args.out)), _subject(args)
    environment = _environment(args)
    with interrupt_on_sigterm():
        comparison = compare(subject, names, args.steps, args.rounds, args.timeout, _print_line)
    print_table(HEADER, rows(comparison), width=140)
    print(f"Results: {', '.join(map(str, write(comparison, environment, out)))}")
    if comparison.stopped:
        print(comparison.stopped, file=sys.stderr)
        return 130
    return int(any(entry.status not in ("same losses", "not installed") for entry in comparison.entries))


def _subject(args: argparse.Namespace) -> Subject:
    from slipstream.compare import config_subject, network_subject
    from slipstream.registry import MODELS

    name: str = args.model
    if Path(name).is_dir() and name not in recipes() and MODELS.get(name) is None:
        raise ConfigError(
            f"'{name}' is a folder; to compare finished runs, use: slipstream report RUN RUN", "compare"
        )
    if name in recipes() or Path(name).suffix or args.config_dir:
        cfg = load_config(name, args.overrides, args.config_dir, bool(args.trust)).cfg
        return config_subject(cfg, Path(name).stem)
    if args.overrides:
        raise UnknownNameError(f"no recipe is named '{name}'{did_you_mean(name, recipes())}", "compare")
    return network_subject(name, args.size, args.batch_size)


def _print_line(line: str) -> None:
    print(line, flush=True)


def _environment(args: argparse.Namespace) -> dict[str, Any]:
    """Return the command, the date, the machine details and the package versions."""
    from slipstream.runner.environment import collect_env
    from slipstream.version import __version__

    env = {key: value for key, value in collect_env().items() if key not in ("world_size", "platform")}
    return {
        "command": shlex.join(["slipstream", *sys.argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu_name(),
        "cores": cores(),
        "load": round(os.getloadavg()[0], 2),
        **env,
        "slipstream": __version__,
        **{package: _version(package) for package in _PEERS},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
