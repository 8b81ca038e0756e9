"""Measure the optimizer step of a ResNet-18 with and without the NaN guard (action 'skip').

    python benchmarks/nan_guard.py --rounds 21 --clock cpu --out benchmarks/results/nan_guard.md

The guard checks all gradients. Fused optimizers can skip a step themselves; for other optimizers, the guard copies the
weights and the optimizer state.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import torch
from torch import nn

from fused import make_optimizer
from report import environment_info, table, write_result
from slipstream.optim import OptimWrapper
from slipstream.speed.nan_guard import SkipNonFinite

CASES = {"fused AdamW": ("AdamW", "fused"), "unfused AdamW": ("AdamW", "loop"),
         "fused SGD with momentum": ("SGD", "fused"), "unfused SGD with momentum": ("SGD", "loop")}  # fmt: skip
CLOCKS: dict[str, Callable[[], float]] = {"wall": perf_counter, "cpu": process_time}


def steps(case: str) -> dict[str, Callable[[], None]]:
    """Return the contenders after two warm-up steps each."""
    plain, guarded = (OptimWrapper(make_optimizer(*CASES[case])) for _ in range(2))
    guard = SkipNonFinite(nn.Module(), torch.device("cpu"))
    guarded.parts.append(guard)

    def with_guard() -> None:
        guard.before_batch()
        guarded.step()

    contenders = {"without guard": plain.step, "with guard": with_guard}
    for step in contenders.values():
        step()
        step()
    for one, other in zip(plain.parameters(), guarded.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    return contenders


def measure(case: str, rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Return the milliseconds per step. The contenders take turns."""
    contenders = steps(case)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(rounds):
        order = list(contenders) if index % 2 else list(reversed(contenders))
        for name in order:
            start = clock()
            contenders[name]()
            times[name].append(1e3 * (clock() - start))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=21, help="number of steps per contender")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: CPU time of the process")
    parser.add_argument("--out", type=Path, help="write Markdown to this file, and JSON next to it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    info = environment_info() | {"n (rounds)": args.rounds, "clock": args.clock}
    times = {case: measure(case, args.rounds, CLOCKS[args.clock]) for case in CASES}
    rows = []
    for case, case_times in times.items():
        ratios = [a / b for a, b in zip(case_times["with guard"], case_times["without guard"], strict=True)]
        cells = (f"{median(values):.1f}" for values in case_times.values())
        rows.append([case, *cells, f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"])
    text = table(["ms per step", "without guard", "with guard", "with / without"], rows)
    print(text)
    if args.out:
        title = "Optimizer steps with the parameters of a ResNet-18, with and without the NaN guard"
        write_result(args.out, title, info, text, {"milliseconds": times})


if __name__ == "__main__":
    main()
