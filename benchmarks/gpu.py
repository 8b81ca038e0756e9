"""Speed, memory, syncs and idle time of five recipes' networks on one GPU, with the recipes' crops and batch sizes.

    python benchmarks/gpu.py --out benchmarks/results/gpu.md

For each network, the contenders are an eager loop in bf16, the same loop with `torch.compile(model)`, and
Slipstream's step as one graph with SyncBN and EMA enabled. Batches are already on the device, so only the step
is measured. The total time is about ten minutes; after `--minutes`, no further network starts. (Smoke test:
`--device cpu --size 64 --batch-size 2 --steps 2`.)
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from networks import CLASSES, RECIPES, Case
from report import circumstances, table, write_result
from torch import Tensor, nn

from slipstream import accelerate

SHAPES = {
    "pp_lite_t_seg75": ((768, 768), 8),
    "stdc1_seg75": ((768, 1536), 4),
    "regseg48": ((1024, 1024), 4),
    "segformer_b0": ((1024, 1024), 2),
    "ddrnet_23": ((1024, 1024), 6),
}
"""Height, width and batch size of each recipe."""
GUIDE = {
    "pp_lite_t_seg75": 56.0,
    "stdc1_seg75": 63.9,
    "regseg48": 13.2,
    "segformer_b0": 18.7,
    "ddrnet_23": 23.1,
}
"""Percentage by which torch.compile reduces the epoch time in SuperGradients' guide, without SyncBN and EMA."""
Step = Callable[[Any], Tensor]


def loop(case: Case, device: torch.device, compiled: bool) -> Step:
    net = case.build().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    run: Any = torch.compile(net) if compiled else net

    def step(batch: Any) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = case.loss(run(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def one_graph(case: Case, device: torch.device, **options: Any) -> Step:
    net: nn.Module = case.build()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    speed = {
        "precision": "bf16",
        "compile": {"scope": "step", "wait": True},
        "sync_bn": True,
        "ema": {"decay": 0.9999, "type": "threshold"},
        **options,
    }
    train = accelerate(net, optimizer, case.loss, speed=speed)
    return lambda batch: train(batch)["loss"]


CONTENDERS: dict[str, Callable[[Case, torch.device], Step]] = {
    "eager bf16": lambda case, device: loop(case, device, compiled=False),
    "loop, torch.compile(model)": lambda case, device: loop(case, device, compiled=True),
    "Slipstream, one graph": one_graph,
    "Slipstream, one graph, channels_last": lambda case, device: one_graph(case, device, channels_last=True),
    "Slipstream, one graph, CUDA graph": lambda case, device: one_graph(case, device, cuda_graph=True),
}


class Device:
    """Measurements on the device. On the CPU, only the time is measured."""

    def __init__(self, name: str) -> None:
        self.device = torch.device(name)
        self.is_gpu = self.device.type == "cuda"

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def start_memory(self) -> None:
        if self.is_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float:
        return torch.cuda.max_memory_allocated() / 2**30 if self.is_gpu else float("nan")

    def waits_per_step(self, step: Step, batches: list[Any]) -> float:
        """Return the number of host-device synchronisations, as counted by torch."""
        if not self.is_gpu:
            return float("nan")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for batch in batches:
                    step(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(w.message) for w in caught) / len(batches)

    def over_kernels(self, step: Step, batches: list[Any], seconds: float) -> float:
        """Return the step time divided by the sum of kernel times. It is 1 if the GPU is never idle."""
        if not self.is_gpu:
            return float("nan")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for batch in batches:
                step(batch)
            self.wait()
        kernels = sum(event.self_device_time_total for event in profile.key_averages()) * 1e-6 / len(batches)
        return seconds / kernels if kernels else float("nan")


def measure(make: Callable[[], Step], batches: list[Any], device: Device, steps: int) -> dict[str, float]:
    device.start_memory()
    start = perf_counter()
    step = make()
    first = float(step(batches[0]))
    compile_seconds = perf_counter() - start
    for number in range(5):
        step(batches[number % len(batches)])
    device.start_memory()
    times = []
    for _ in range(3):
        device.wait()
        start = perf_counter()
        for number in range(steps):
            step(batches[number % len(batches)])
        device.wait()
        times.append((perf_counter() - start) / steps)
    seconds = median(times)
    return {
        "images per second": len(batches[0][0]) / seconds,
        "seconds per step": seconds,
        "peak GiB": device.peak_gib(),
        "waits per step": device.waits_per_step(step, batches),
        "step / kernels": device.over_kernels(step, batches, seconds),
        "seconds to the first step": compile_seconds,
        "first loss": first,
    }


def measure_network(name: str, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    (height, width), batch_size = SHAPES[name]
    if args.size:
        height = width = args.size
    case = replace(RECIPES[name], shape=(3, height, width), batch_size=args.batch_size or batch_size)
    device = Device(args.device)
    batches = [tuple(t.to(device.device) for t in batch) for batch in case.batches(4)]
    found: dict[str, dict[str, float]] = {}
    for contender, make in CONTENDERS.items():
        if contender.endswith("CUDA graph") and not device.is_gpu:
            continue
        torch._dynamo.reset()
        own = [tuple(copy.deepcopy(batch)) for batch in batches]
        try:
            found[contender] = measure(lambda make=make: make(case, device.device), own, device, args.steps)
        except Exception as error:  # if one contender fails, the results of the others must be kept
            print(f"{name}, {contender}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
            continue
        line = ", ".join(f"{key} {value:.4g}" for key, value in found[contender].items())
        print(f"{name}, {contender}: {line}", flush=True)
    return found


def describe(name: str, found: dict[str, dict[str, float]]) -> str:
    eager = found["eager bf16"]["seconds per step"]
    rows = [
        [
            contender,
            f"{values['images per second']:.1f}",
            f"{100 * (1 - values['seconds per step'] / eager):.1f} %",
            f"{values['peak GiB']:.2f}",
            f"{values['waits per step']:.1f}",
            f"{values['step / kernels']:.2f}",
            f"{values['seconds to the first step']:.0f}",
        ]
        for contender, values in found.items()
    ]
    header = [
        "",
        "images/s",
        "time saved over eager",
        "peak GiB",
        "waits per step",
        "step / kernels",
        "s to first step",
    ]
    goal = f"SuperGradients' guide: {GUIDE[name]} % less time per epoch with compilation, without SyncBN and EMA."
    return f"## {name}\n\n{table(header, rows)}\n\n{goal}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--networks", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--size", type=int, help="crop size (default: the recipe's)")
    parser.add_argument("--batch-size", type=int, help="batch size (default: the recipe's)")
    parser.add_argument("--minutes", type=float, default=9, help="start no further network after this time")
    parser.add_argument(
        "--out", type=Path, help="write Markdown to this file, and JSON next to it, after each network"
    )
    args = parser.parse_args()
    start, results = perf_counter(), {}
    facts = circumstances() | {"classes": CLASSES, "steps": args.steps}
    if args.device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
    for name in args.networks:
        if perf_counter() - start > 60 * args.minutes:
            print(f"time limit reached: skipping {name} and the following networks")
            break
        results[name] = measure_network(name, args)
        text = "\n\n".join(describe(network, found) for network, found in results.items())
        if args.out:
            write_result(args.out, "Training steps on a GPU", facts, text, {"networks": results})
    print(f"\n{text}")


if __name__ == "__main__":
    sys.exit(main())
