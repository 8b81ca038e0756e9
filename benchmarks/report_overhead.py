"""Time that the run report adds to training: the stopwatch in the loop, the hook, and writing the files.

    python benchmarks/report_overhead.py --steps 200 --rounds 9 --out benchmarks/results/report_overhead.md

Each round trains the same MLP twice in this process: with the report, and without it. "Without" removes the hook and
replaces the stopwatch by an object whose methods do nothing. The order alternates, and ratios are computed within a
round, so that changes in machine speed affect both runs equally.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from report import circumstances, table, write_result
from slipstream.hooks import Hook
from slipstream.logging import PhaseTimes
from slipstream.model import BaseModel
from slipstream.runner import Runner

WIDTHS = {"width 360, batch 64": (64, 360), "width 32, batch 8": (8, 32)}
"""Batch size and width of the network of each case."""


class Net(BaseModel):
    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.layers = nn.Sequential(*layers, nn.Linear(width, 4))

    def forward(self, inputs: Tensor, targets: Tensor, mode: str) -> Any:
        scores = self.layers(inputs)
        return {"loss": F.cross_entropy(scores, targets)} if mode == "loss" else scores


class NoTimes:
    """A stopwatch whose methods do nothing."""

    seconds: dict[str, float] = {}  # noqa: RUF012
    first: dict[str, float] = {}  # noqa: RUF012
    steps, current = 0, "other"

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def switch(self, phase: str) -> None: ...
    def end_step(self) -> None: ...

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        yield


class Clock(Hook):
    """Measures wall time and CPU time from the first step to the end of training, and to the end of the run."""

    priority = "HIGHEST"

    def before_train(self, runner: Runner) -> None:
        self.start = perf_counter(), process_time()

    def after_train(self, runner: Runner) -> None:
        self.trained = perf_counter(), process_time()


def train(case: str, steps: int, with_report: bool) -> dict[str, float]:
    """Return the milliseconds per step (wall and CPU time), and from the last step to the end of `train`."""
    batch, width = WIDTHS[case]
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(batch * 20, width, generator=generator),
        torch.randint(0, 4, (batch * 20,), generator=generator),
    )
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(
            model=Net(width),
            work_dir=folder,
            train_dataloader=DataLoader(data, batch),
            train_cfg={"by_epoch": False, "max_iters": steps},
            optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.01, "momentum": 0.9}},
            default_hooks={"checkpoint": None, **({} if with_report else {"report": None})},
            custom_hooks=[clock],
            visualizer={"vis_backends": [{"type": "LocalVisBackend"}]},
            randomness={"seed": 0},
            log_level="ERROR",
        )
        if not with_report:
            runner.phases = NoTimes()
        runner.train()
        end = perf_counter()
        assert bool(list(Path(runner.log_dir).glob("report.json"))) == with_report
    wall, cpu = (after - before for before, after in zip(clock.start, clock.trained, strict=True))
    return {"wall": 1e3 * wall / steps, "cpu": 1e3 * cpu / steps, "end": 1e3 * (end - clock.trained[0])}


def measure(case: str, steps: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    times: dict[str, list[dict[str, float]]] = {"with": [], "without": []}
    for both in (True, False):  # warm-up
        train(case, max(steps // 10, 20), both)
    for number in range(rounds):
        for with_report in (True, False) if number % 2 else (False, True):
            times["with" if with_report else "without"].append(train(case, steps, with_report))
        line = ", ".join(f"{name} {values[-1]['cpu']:.3f}" for name, values in times.items())
        print(f"{case}, round {number + 1}/{rounds}: CPU ms per step {line}", flush=True)
    return times


def stopwatch_us(repeats: int = 20_000) -> list[float]:
    """Return the microseconds of CPU time that the stopwatch calls of one eager step take, in 9 measurements."""
    found = []
    for _ in range(9):
        phases = PhaseTimes()
        phases.start()
        start = process_time()
        for _ in range(repeats):
            # the calls of run_iter, of the data preprocessor, and of EagerStep with an optimizer update
            for phase in (
                "hooks",
                "step",
                "preprocess",
                "step",
                "forward",
                "backward",
                "optimizer",
                "backward",
            ):
                phases.switch(phase)
            for phase in ("step", "logging", "hooks"):
                phases.switch(phase)
            phases.end_step()
        found.append(1e6 * (process_time() - start) / repeats)
    return found


def summary(case: str, times: dict[str, list[dict[str, float]]]) -> list[str]:
    def ratio(key: str) -> str:
        ratios = [a[key] / b[key] for a, b in zip(times["with"], times["without"], strict=True)]
        return f"{median(ratios):.4f} ({min(ratios):.3f} to {max(ratios):.3f})"

    def middle(name: str, key: str) -> float:
        return median(values[key] for values in times[name])

    differences = [a["cpu"] - b["cpu"] for a, b in zip(times["with"], times["without"], strict=True)]
    return [
        case,
        f"{middle('without', 'cpu'):.3f}",
        f"{middle('with', 'cpu'):.3f}",
        f"{1e3 * median(differences):+.1f}",
        ratio("cpu"),
        ratio("wall"),
        f"{middle('with', 'end') - middle('without', 'end'):.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400, help="training steps per run")
    parser.add_argument("--rounds", type=int, default=15, help="number of pairs of runs per case")
    parser.add_argument("--out", type=Path, help="write Markdown to this file, and JSON next to it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    facts = circumstances() | {"steps": args.steps, "n (pairs)": args.rounds}
    run = partial(measure, rounds=args.rounds)
    times = {
        case: run(case, steps=args.steps * (1 if width > 100 else 5)) for case, (_, width) in WIDTHS.items()
    }
    calls = stopwatch_us()
    header = [
        "", "CPU ms per step, without", "with", "median difference, µs", "CPU time, with / without",
        "wall time, with / without", "ms to write the report",
    ]  # fmt: skip
    text = table(header, [summary(case, values) for case, values in times.items()]) + (
        "\n\nEach row contains medians; ratios are medians of pairs, with their range. The time to write the report "
        "is the difference between the medians of the times from the last step to the end of `Runner.train`.\n\n"
        f"The stopwatch calls of one eager step take {median(calls):.2f} µs of CPU time (median of {len(calls)}), "
        f"{median(calls) / 50:.2f} % of a step of 5 ms."
    )
    print(text)
    if args.out:
        write_result(
            args.out, "Overhead of the run report", facts, text, {"times": times, "stopwatch_us": calls}
        )


if __name__ == "__main__":
    main()
