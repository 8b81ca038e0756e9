"""`slipstream bench`: measure eager and compiled training speed on one and two devices, with and without AMP."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from slipstream.cli.bench_cell import Cell
from slipstream.cli.bench_report import Measurement, write_report
from slipstream.cli.child import interrupt_on_sigterm, run_child
from slipstream.cli.configure import load_config
from slipstream.cli.profile import prepare_output_folder
from slipstream.cli.tables import print_table
from slipstream.cores import cores, cpu_name
from slipstream.errors import ConfigError

__all__ = ["run"]

_RECIPES = [
    f"street_scenes_{name}"
    for name in ("pp_lite_t", "stdc1_seg", "regseg48", "segformer_b0", "ddrnet_23_slim")
]
_MIN_WARMUP = 3  # the second step captures and verifies the graph of a compiled step


def run(args: argparse.Namespace) -> int:
    """Execute each run in a separate process, and update the report after each run.

    Returns:
        0 if all runs succeeded, 1 if a run failed, 130 after Ctrl-C or SIGTERM.

    Raises:
        ConfigError: an option is invalid, a recipe does not exist, or the output folder is not writable.
    """
    if args.warmup < _MIN_WARMUP:
        raise ConfigError(
            f"must be at least {_MIN_WARMUP}, because the compiled step is captured and verified during the "
            "second step",
            "--warmup",
        )
    for recipe in args.recipes:
        load_config(recipe, (), args.config_dir, bool(args.trust))
    out = prepare_output_folder(Path(args.out))
    environment = _environment(args)
    results: list[Measurement] = []
    status = 0
    try:
        with interrupt_on_sigterm():
            cells = list(_cells(args))
            for number, cell in enumerate(cells, start=1):
                print(f"{number}/{len(cells)}  {cell.recipe}: {cell.options}", end="  ", flush=True)
                results.append(_measure(cell, args.timeout))
                print(results[-1].summary(), flush=True)
                write_report(out, environment, results, plot=False)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    finally:
        files = write_report(out, environment, results, plot=True)
        print_table(
            ["recipe", "options", "result"], [[m.cell.recipe, m.cell.options, m.summary()] for m in results]
        )
        print(f"Results: {', '.join(map(str, files))}")
    return status or int(any(measured.error for measured in results))


def _cells(args: argparse.Namespace) -> Iterator[Cell]:
    """Yield the runs selected by the options. A recipe's eager runs come before its compiled runs."""
    modes = [False, True] if args.mode is None else [args.mode == "compiled"]
    devices = _device_counts() if args.devices is None else [args.devices]
    precisions = [False, True] if args.precision is None else [args.precision == "amp"]
    averaged = [False, True] if args.averaging is None else [args.averaging == "on"]
    for recipe in args.recipes or _RECIPES:
        base = Cell(
            recipe, False, 1, False, False, args.synthetic, args.warmup, args.steps, args.batch_size, args.size,
            config_dir=args.config_dir, trust=bool(args.trust),
        )  # fmt: skip
        for compiled, count, amp, averaging in itertools.product(modes, devices, precisions, averaged):
            yield replace(base, compiled=compiled, processes=count, amp=amp, averaging=averaging)


def _device_counts() -> list[int]:
    """Return the device counts to measure by default. Two processes can share the CPU, but not a GPU."""
    import torch

    from slipstream.devices import default_device

    return [1, 2] if default_device().type == "cpu" or torch.accelerator.device_count() > 1 else [1]


def _measure(cell: Cell, timeout: float) -> Measurement:
    """Execute a run in a separate process. All runs use the same number of cores in total."""
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        spec, result = Path(folder) / "spec.json", Path(folder) / "result.json"
        spec.write_text(json.dumps(asdict(cell)), encoding="utf-8")
        threads = str(max(1, cores() // cell.processes))
        argv = ["-m", "slipstream.cli.bench_cell", str(spec), str(result)]
        child = run_child(argv, timeout=timeout, quiet=True, grace=2.0, environ={"OMP_NUM_THREADS": threads})
        if child.status or not result.is_file():
            return Measurement(
                cell,
                error=child.reason
                or "the process did not write a result; train the recipe and check its log",
            )
        values: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return Measurement(
        cell, values["seconds"], values["samples_per_step"], values["memory"], values["threads"]
    )


def _environment(args: argparse.Namespace) -> dict[str, Any]:
    """Return the command, the date, the machine details and the package versions."""
    from slipstream.runner.environment import collect_env
    from slipstream.version import __version__

    env = {key: value for key, value in collect_env().items() if key not in ("world_size", "cpu_threads")}
    return {
        "command": shlex.join(["slipstream", *sys.argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu_name(),
        "cores": cores(),
        "load": round(os.getloadavg()[0], 2),
        **env,
        "slipstream": __version__,
        "warm-up steps": args.warmup,
        "timed steps": args.steps,
        "data": "one batch, repeated" if args.synthetic else "the recipe's data, loaded as in training",
    }
