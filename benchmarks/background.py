"""Measure how much background compilation slows down training, and how long it takes until the graph is used.

python benchmarks/background.py --out benchmarks/results/background.md

Each network is trained in a fresh process with an empty cache, once with one thread per core and once with one thread
fewer. While the training step is being compiled, the compilation is repeatedly paused and resumed (SIGSTOP, SIGCONT),
so that training speed is measured with and without compilation over the same period. Training continues until the graph
is used or `--limit` is reached.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from networks import RECIPES, Case
from report import environment_info, table, write_result
from slipstream.speed.accelerate import TrainStep, accelerate

SLICE, PAIRS = 2.0, 8
"""Duration of each pause and of each interval between pauses, in seconds, and the number of repetitions."""
GRAPH_BATCHES = 200
"""Number of batches to time with the compiled graph."""


def _perceptron() -> nn.Module:
    hidden = [layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(128, 10))


CASES = {
    "6 x (Linear, BatchNorm, ReLU), batch 256": Case(
        _perceptron, lambda x, y: F.cross_entropy(x, y), (128,), 10, 256
    ),
    "pp_lite_t_seg75, 4x3x128x128": RECIPES["pp_lite_t_seg75"],
}


def make_step(case: Case, wait: bool) -> TrainStep:
    net = case.build()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    return accelerate(net, optimizer, case.loss, speed={"compile": {"scope": "step", "wait": wait}})


def has_switched(step: TrainStep) -> bool:
    captured = step._step._step
    return captured is not None and bool(captured.verified)


def train_for(seconds: float, step: TrainStep, batches: list[Any]) -> list[float]:
    """Train for `seconds`, and return the duration of each step in seconds."""
    times, end = [], perf_counter() + seconds
    while perf_counter() < end:
        times.append(step_seconds(step, batches[len(times) % len(batches)]))
    return times


def step_seconds(step: TrainStep, batch: Any) -> float:
    start = perf_counter()
    step(batch)
    return perf_counter() - start


def measure_background(case: Case, limit: float) -> dict[str, Any]:
    """Train with background compilation, and return the measurements."""
    step, batches = make_step(case, wait=False), case.batches(8)
    start = perf_counter()
    first = step_seconds(step, batches[0])
    step_seconds(step, batches[1])
    compiler = step._step.background
    paused: list[float] = []
    running: list[float] = []
    ratios, pid = [], compiler._pid
    for _ in range(PAIRS):
        if compiler.started and not has_switched(step):
            os.killpg(pid, signal.SIGSTOP)
            paused_times = train_for(SLICE, step, batches)
            os.killpg(pid, signal.SIGCONT)
            running_times = train_for(SLICE, step, batches)
            if not has_switched(step):
                ratios.append(statistics.mean(running_times) / statistics.mean(paused_times))
                paused += paused_times
                running += running_times
    times: list[float] = []
    while not has_switched(step) and perf_counter() - start < limit:
        times.append(step_seconds(step, batches[len(times) % len(batches)]))
    measurements = {
        "seconds of the first batch": first,
        "ms, compilation paused": 1e3 * statistics.median(paused),
        "ms, compilation running": 1e3 * statistics.median(running),
        "running over paused": statistics.median(ratios),
        "all ratios": ratios,
    }
    if not has_switched(step):
        return {**measurements, "seconds of compilation": None}
    after = [step_seconds(step, batches[i % len(batches)]) for i in range(GRAPH_BATCHES)]
    return {
        **measurements,
        "seconds of compilation": compiler.seconds - SLICE * len(ratios),
        "seconds of the batch that switches to the graph": max(times),
        "ms, one graph": 1e3 * statistics.median(after),
    }


def measure_waiting(case: Case) -> dict[str, Any]:
    """Train with `wait=True`, which compiles before the second batch, and return the measurements."""
    step, batches = make_step(case, wait=True), case.batches(8)
    start = perf_counter()
    for index in range(8):
        step_seconds(step, batches[index])
    after = [step_seconds(step, batches[i % len(batches)]) for i in range(GRAPH_BATCHES)]
    return {
        "seconds to batch 8": perf_counter() - start - sum(after),
        "ms, one graph": 1e3 * statistics.median(after),
    }


def measure_in_process(name: str, threads: int, limit: float, wait: bool) -> dict[str, Any]:
    """Measure in a separate process with an empty cache, and return the measurements."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "SLIPSTREAM_CACHE": folder, "OMP_NUM_THREADS": str(threads)}
        environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
        command = [
            sys.executable,
            __file__,
            "--case",
            name,
            "--limit",
            str(limit),
            *(["--wait"] if wait else []),
        ]
        process = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        measurements: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
        return measurements


def row(name: str, threads: int, background: dict[str, Any], waiting: dict[str, Any] | None) -> list[str]:
    def cell(key: str, digits: int = 1, values: dict[str, Any] = background) -> str:
        value = values.get(key)
        return "-" if value is None else f"{value:.{digits}f}"

    return [
        f"{name}, {threads} thread{'s' * (threads > 1)}",
        cell("ms, compilation paused", 2),
        cell("running over paused", 2),
        cell("seconds of compilation", 0),
        cell("seconds of the batch that switches to the graph"),
        cell("ms, one graph", 2),
        cell("seconds to batch 8", 0, waiting or {}),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--limit", type=float, default=300, help="maximum training time per network, in seconds"
    )
    parser.add_argument("--out", type=Path, help="write Markdown to this file, and JSON next to it")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--wait", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        case = CASES[args.case]
        print(json.dumps(measure_waiting(case) if args.wait else measure_background(case, args.limit)))
        return
    info, cores = environment_info(["slipstream"]), os.cpu_count() or 1
    measured: dict[str, Any] = {}
    rows = []
    for name in CASES:
        for threads in sorted({max(1, cores - 1), cores}):
            background = measure_in_process(name, threads, args.limit, wait=False)
            waiting = (
                measure_in_process(name, threads, args.limit, wait=True)
                if background["seconds of compilation"]
                else None
            )
            measured[f"{name}, {threads} threads"] = {"background": background, "wait": waiting}
            rows.append(row(name, threads, background, waiting))
    header = [
        "network",
        "eager, ms per batch",
        "during compilation, relative to eager",
        "compilation, s",
        "batch that switches to the graph, s",
        "one graph, ms per batch",
        "wait=True, s until batch 8",
    ]
    text = table(header, rows) + (
        f"\n\nA dash means that the graph was not compiled within {args.limit:.0f} s. Compilation runs with a nice "
        "value of 12. If training uses all cores, compilation therefore gets 6 to 7% of a core. If one core is free, "
        "compilation takes about as long as with wait=True."
    )
    print(text)
    if args.out:
        write_result(args.out, "Compilation in the background", info, text, {"measured": measured})


if __name__ == "__main__":
    sys.exit(main())
