"""Compare the training step, compiled as one graph, with hand-written loops.

    python benchmarks/one_graph.py --rounds 7 --out benchmarks/results/one_graph.md

The benchmark has three parts. For tiny networks, (1) in one process and (2) in two gloo processes, the loops are an
eager loop and a `torch.compile(model)` loop. For the recipes' networks, with their losses and small crops (3), they are
an eager loop and a channels_last loop. The contenders are interleaved in rotating order, and ratios are computed within
a round. Before timing, the losses of the first steps must match the loop's losses, except for channels_last, where
dropout draws its random numbers in a different order. On a shared machine, use `--clock cpu --threads 1` to measure the
CPU time of this process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from networks import RECIPES, Case
from overhead import conv_net, mlp
from report import environment_info, table, write_result
from slipstream import accelerate

CHECKED_STEPS = 4
CLOCKS = {"wall": perf_counter, "cpu": process_time}
Step = Callable[[Any], Tensor]


TINY = {
    "MLP": Case(mlp, F.cross_entropy, (16,), 4, 8),
    "conv net": Case(conv_net, F.cross_entropy, (3, 16, 16), 4, 8),
}


# ---- the contenders ------------------------------------------------------------------------------------


def loop(
    case: Case, compiled: bool = False, memory_format: torch.memory_format = torch.preserve_format
) -> Step:
    net = case.build().to(memory_format=memory_format)
    optimizer = torch.optim.SGD(net.parameters(), lr=case.learning_rate, momentum=0.9)
    run: Any = DistributedDataParallel(net) if dist.is_initialized() else net
    run = torch.compile(run) if compiled else run

    def step(batch: Any) -> Tensor:
        loss = case.loss(run(batch[0].to(memory_format=memory_format)), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def one_graph(case: Case) -> Step:
    net = case.build()
    optimizer = torch.optim.SGD(net.parameters(), lr=case.learning_rate, momentum=0.9)
    train = accelerate(net, optimizer, case.loss, speed={"compile": {"scope": "step", "cache": False}})
    return lambda batch: train(batch)["loss"]


CONTENDERS: dict[str, Callable[[Case], Step]] = {
    "loop": loop,
    "loop, channels_last": lambda case: loop(case, memory_format=torch.channels_last),
    "loop, torch.compile(model)": lambda case: loop(case, compiled=True),
    "Slipstream, one graph": one_graph,
}
TINY_CONTENDERS = ("loop", "loop, torch.compile(model)", "Slipstream, one graph")
# Compiling a recipe's network takes minutes, so these cases omit the loop with `torch.compile(model)`.
RECIPE_CONTENDERS = ("loop", "loop, channels_last", "Slipstream, one graph")


# ---- measurement ---------------------------------------------------------------------------------------


def measure(
    case: Case, rounds: int, seconds: float, names: Sequence[str], clock: Callable[[], float] = perf_counter
) -> dict[str, list[float]]:
    """Return the milliseconds per step for each contender in `names` and each round."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    batches = case.batches(16, seed=rank)
    steps = {}
    expected: Tensor | None = None
    for name in names:
        torch._dynamo.reset()
        step = steps[name] = CONTENDERS[name](case)
        losses = torch.stack([step(batch) for batch in batches[:CHECKED_STEPS]])
        expected = losses if expected is None else expected
        # With channels_last, dropout draws its random numbers in a different order.
        if "channels_last" not in name:
            torch.testing.assert_close(
                losses, expected, rtol=case.tolerance, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )
    count = broadcast_count(max(1, round(seconds / seconds_per_step(steps["loop"], batches, 3, clock))))
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for index in range(rounds):
        offset = index % len(order)
        for name in order[offset:] + order[:offset]:
            times[name].append(seconds_per_step(steps[name], batches, count, clock) * 1e3)
    return times


def seconds_per_step(step: Step, batches: list[Any], count: int, clock: Callable[[], float]) -> float:
    if dist.is_initialized():
        dist.barrier()
    start = clock()
    for index in range(count):
        loss = step(batches[index % len(batches)])
    float(loss)
    return (clock() - start) / count


def broadcast_count(count: int) -> int:
    if dist.is_initialized():
        tensor = torch.tensor(count)
        dist.broadcast(tensor, 0)
        count = int(tensor)
    return count


def process(rank: int, rounds: int, seconds: float, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    times = {name: measure(case, rounds, seconds, TINY_CONTENDERS) for name, case in TINY.items()}
    if rank == 0:
        Path(folder, "times.json").write_text(json.dumps(times))
    dist.destroy_process_group()


def measure_two_processes(rounds: int, seconds: float) -> dict[str, dict[str, list[float]]]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(process, (rounds, seconds, folder), nprocs=2)
        result: dict[str, dict[str, list[float]]] = json.loads(Path(folder, "times.json").read_text())
    return result


def ratios(times: dict[str, list[float]], name: str, base: str) -> list[float]:
    return [a / b for a, b in zip(times[name], times[base], strict=True)]


def describe(cases: dict[str, dict[str, list[float]]]) -> str:
    *others, slipstream = next(iter(cases.values()))
    rows = []
    for name, times in cases.items():
        ratio_lists = [ratios(times, slipstream, other) for other in others]
        fastest = min(others, key=lambda other: median(times[other]))
        rows.append(
            [
                name,
                *(f"{median(values):.3g}" for values in times.values()),
                *(f"{median(r):.2f} ({min(r):.2f} to {max(r):.2f})" for r in ratio_lists),
                fastest,
            ]
        )
    ratio_titles = [f"one graph / {name}" for name in others]
    header = ["", *(f"{name}, ms" for name in (*others, slipstream)), *ratio_titles, "fastest of the others"]
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="number of measurements of each contender")
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds per contender and round")
    parser.add_argument(
        "--threads", type=int, default=2, help="number of torch threads for the single-process part"
    )
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="clock for the single-process part; cpu measures the CPU time of the process",
    )
    parser.add_argument(
        "--networks",
        nargs="*",
        default=[*TINY, *(n for n in RECIPES if n != "ddrnet_23")],
        help="networks to train",
    )
    parser.add_argument(
        "--crop", type=int, default=64, help="size of the square crops on which the recipes' networks train"
    )
    parser.add_argument("--no-processes", action="store_true", help="skip the two-process part")
    parser.add_argument("--out", type=Path, help="write Markdown to this file, and JSON next to it")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    info = environment_info() | {"n (rounds)": args.rounds, "crop size for the recipe networks": args.crop}
    info["clock"] = args.clock
    parts: dict[str, dict[str, dict[str, list[float]]]] = {}
    for title, cases in (("Tiny networks", TINY), ("The recipes' networks", RECIPES)):
        for name in [name for name in cases if name in args.networks]:
            names = TINY_CONTENDERS if cases is TINY else RECIPE_CONTENDERS
            case = cases[name] if cases is TINY else replace(cases[name], shape=(3, args.crop, args.crop))
            times = measure(case, args.rounds, args.seconds, names, CLOCKS[args.clock])
            parts.setdefault(title, {})[name] = times
            print(describe({name: times}), flush=True)
    if not args.no_processes:
        parts["Tiny networks in two gloo processes (the loop uses DDP)"] = measure_two_processes(
            args.rounds, args.seconds
        )
    text = "\n\n".join(f"## {title}\n\n{describe(cases)}" for title, cases in parts.items())
    text += (
        "\n\nTimes are the median milliseconds per step. Ratios are medians (minimum to maximum) of the ratios within "
        "each round."
    )
    print(f"\n{text}")
    if args.out:
        write_result(args.out, "The training step as one graph", info, text, {"milliseconds": parts})


if __name__ == "__main__":
    sys.exit(main())
