"""Measure the networks of five recipes on one GPU: step time, memory, kernel launches and host-device synchronizations.

    python benchmarks/gpu.py --out benchmarks/results/gpu.md

All contenders of a network train in bf16 on batches that are already on the device, so only the step is measured. They
are created one after the other and then measured in turn. The results are written after every contender, so they are
kept if the benchmark is interrupted. A later run on the same GPU, for example with different `--networks`, adds its
results to the same files. On a GPU, parallel processes first compile the contenders in `COMPILED`, so that the process
that measures them loads their code from inductor's cache. The rest of `--minutes` is divided evenly among the networks;
when a network's time has elapsed, its remaining contenders are skipped. (Smoke test:
`--device cpu --size 64 --batch-size 2 --steps 2`.)
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from flops import peak_flops, training_flops, without_data
from gpu_contenders import COMPILED, EAGER, Clock, Setting, Train, contenders
from networks import RECIPES
from report import environment_info, table, write_result

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
"""Percentage by which compilation reduces epoch time, according to SuperGradients' guide (without SyncBN or EMA)."""
IMAGES = 2975
"""Number of images in a Cityscapes epoch."""
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "hipLaunch", "hipModuleLaunch", "hipGraphLaunch")
MATCHING_FIELDS = ("device", "torch", "backend", "steps", "rounds", "crop", "batch size")
"""Fields that must match for new results to be added to earlier ones."""
NOT_MEASURED = "not measured (time limit)"
Figures = dict[str, Any]


class Device:
    """Measurements on a device. Measurements that the device does not support are NaN."""

    def __init__(self, name: str) -> None:
        self.device = torch.device(name)
        self.is_cpu = self.device.type == "cpu"
        self.name = "CPU" if self.is_cpu else torch.get_device_module(self.device).get_device_name()
        peak = peak_flops(self.name, "bf16")
        self.peak_flops = math.nan if peak is None else peak[0]

    def free_memory(self) -> int:
        """Free unused memory, and return the number of bytes that remain reserved."""
        gc.collect()
        if self.is_cpu:
            return 0
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        return int(torch.accelerator.memory_reserved())

    def peak_bytes(self) -> float:
        """Return the peak reserved memory in bytes. Unlike allocated memory, it includes the memory of CUDA graphs."""
        return math.nan if self.is_cpu else torch.accelerator.max_memory_reserved()

    def host_reads(self, train: Train, steps: int) -> float:
        """Return how many times the host waits for the device in one step, as reported by torch."""
        if self.device.type != "cuda":
            return math.nan
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                train(steps, Clock(self.device))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(w.message) for w in caught) / steps

    def kernels(self, train: Train, steps: int) -> tuple[float, float]:
        """Return the total kernel time in seconds and the number of launches per step."""
        if self.device.type != "cuda":
            return math.nan, math.nan
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as events:
            train(steps, Clock(self.device))
            torch.cuda.synchronize()
        averages = events.key_averages()
        on_device = (
            event
            for event in averages
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation
        )
        seconds = sum(event.self_device_time_total for event in on_device) * 1e-6
        launches = sum(event.count for event in averages if event.key.startswith(LAUNCHES))
        return seconds / steps, launches / steps


def flops(setting: Setting) -> int:
    """Return the number of floating-point operations in the matrix products and convolutions of one step."""
    net, _ = setting.network(fused=False)
    batch = without_data(setting.batches[0])
    return training_flops(net, batch, lambda net, batch: setting.case.loss(net(batch[0]), batch[1]))


def create(make: Any, setting: Setting, device: Device, steps: int) -> tuple[Train, Figures]:
    """Create a contender. Measure its memory, synchronizations and kernels, and its step time for the first round."""
    before, start, clock = device.free_memory(), perf_counter(), Clock(device.device)
    train = make(setting)
    first = float(train(1, clock))
    float(train(3, clock))  # Slipstream compiles in the second step
    figures: Figures = {"first loss": first, "seconds of the first four steps": perf_counter() - start}
    device.free_memory()
    train(3, clock)
    figures["peak bytes"] = device.peak_bytes() - before
    figures["synchronizations per step"] = device.host_reads(train, steps)
    figures["kernel seconds"], figures["launches per step"] = device.kernels(train, steps)
    figures["seconds"] = [seconds_per_step(train, device, steps)]
    return train, figures


def error_figures(error: Exception) -> Figures:
    return {"error": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:200]}


def seconds_per_step(train: Train, device: Device, steps: int) -> float:
    clock = Clock(device.device)
    train(steps, clock)
    return clock.seconds() / steps


class Results:
    """All measurements, which are written to the result files after each contender."""

    def __init__(self, out: Path | None, info: dict[str, Any]) -> None:
        self.out, self.info = out, info
        self.networks: dict[str, Figures] = {}
        if out and (old := out.with_suffix(".json")).exists():
            try:
                document = dict(json.loads(old.read_text(encoding="utf-8")))
            except (ValueError, TypeError) as error:
                sys.exit(f"{old} cannot be read ({error}); delete it, or choose a different --out")
            if all(document.get(key) == info[key] for key in MATCHING_FIELDS):
                self.networks = document["networks"]

    def slipstream_figures(self) -> Iterator[Figures]:
        """Yield the measurements of the contenders that use Slipstream."""
        for network in self.networks.values():
            yield from (figures for name, figures in network["contenders"].items() if "Slipstream" in name)

    def write(self) -> str:
        text = "\n\n".join(describe(name, network) for name, network in self.networks.items())
        if self.out:
            write_result(
                self.out, "Training steps on one device", self.info, text, {"networks": self.networks}
            )
        return text


def setting_of(name: str, args: argparse.Namespace, device: Device) -> Setting:
    (height, width), batch_size = SHAPES[name]
    if args.size:
        height = width = args.size
    case = replace(RECIPES[name], shape=(3, height, width), batch_size=args.batch_size or batch_size)
    batches = [tuple(tensor.to(device.device) for tensor in batch) for batch in case.batches(4)]
    return Setting(case, device.device, batches, args.backend)


def compile_in_parallel(args: argparse.Namespace, seconds: float) -> None:
    """Fill inductor's cache with the code of all compiled contenders of all networks, each in its own process."""
    chosen = [name for name in args.contenders or COMPILED if name in COMPILED]
    common = [sys.executable, __file__, "--compile-only", f"--device={args.device}"]
    common += [f"--size={args.size}"] if args.size else []
    common += [f"--batch-size={args.batch_size}"] if args.batch_size else []
    commands = [
        [*common, "--networks", network, "--contenders", contender]
        for network in args.networks
        for contender in chosen
    ]
    threads = max(1, (os.cpu_count() or 1) // max(1, len(commands)))
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
    end = perf_counter() + seconds
    processes = [subprocess.Popen(command, env=environment) for command in commands]
    for process in processes:
        try:
            process.wait(max(0, end - perf_counter()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def compile_only(args: argparse.Namespace, device: Device) -> None:
    """Compile the chosen contenders of the chosen networks, without measuring them."""
    for network in args.networks:
        setting = setting_of(network, args, device)
        for contender in args.contenders:
            start = perf_counter()
            contenders(device.device)[contender](setting)(4, Clock(device.device))
            print(f"{network}, {contender}: compiled in {perf_counter() - start:.0f} s", flush=True)


def measure(name: str, args: argparse.Namespace, device: Device, results: Results, end: float) -> None:
    setting = setting_of(name, args, device)
    network: Figures = {
        "batch size": setting.case.batch_size,
        "flops": flops(setting),
        "peak flops": device.peak_flops,
    }
    network["contenders"] = entries = {}
    results.networks[name] = network
    running: dict[str, Train] = {}
    torch._dynamo.reset()
    for contender, make in contenders(device.device).items():
        if args.contenders and contender not in args.contenders:
            continue
        if running and perf_counter() > end:
            entries[contender] = {"error": NOT_MEASURED}
            continue
        try:
            running[contender], entries[contender] = create(make, setting, device, args.steps)
        except Exception as error:  # if one contender fails, the others are still measured
            entries[contender] = error_figures(error)
        print(f"{name}, {contender}: {entries[contender]}", flush=True)
        results.write()
    for _ in range(args.rounds - 1):
        for contender, train in list(running.items()):
            try:
                entries[contender]["seconds"].append(seconds_per_step(train, device, args.steps))
            except Exception as error:
                entries[contender] = error_figures(error)
                del running[contender]
    results.write()


def describe(name: str, network: Figures) -> str:
    """Return the table of one network."""
    entries = network["contenders"]
    eager = median(entries.get(EAGER, {}).get("seconds", [math.nan]))
    rows = [[contender, *_row(network, values, eager)] for contender, values in entries.items()]
    header = [
        "",
        "ms per step",
        "time / eager loop",
        "images/s",
        "s per epoch",
        "peak GiB",
        "synchronizations per step",
    ]
    header += ["launches per step", "time / kernel time", "FLOPs utilization", "s for the first four steps"]
    errors = [
        f"- {contender}: {values['error']}" for contender, values in entries.items() if "error" in values
    ]
    guide = (
        f"According to SuperGradients' guide, compilation reduces the time per epoch by {GUIDE[name]}%, without SyncBN"
        " or EMA."
    )
    return "\n\n".join([f"## {name}", table(header, rows), *(["\n".join(errors)] if errors else []), guide])


def _row(network: Figures, values: Figures, eager: float) -> list[str]:
    if "error" in values:
        return ["–"] * 10
    seconds, batch_size = median(values["seconds"]), network["batch size"]
    figures = [
        (1e3 * seconds, ".2f"),
        (seconds / eager, ".3f"),
        (batch_size / seconds, ".1f"),
        (IMAGES // batch_size * seconds, ".1f"),
        (values["peak bytes"] / 2**30, ".2f"),
        (values["synchronizations per step"], ".1f"),
        (values["launches per step"], ".0f"),
        (seconds / (values["kernel seconds"] or math.nan), ".2f"),
        (network["flops"] / seconds / network["peak flops"], ".1%"),
        (values["seconds of the first four steps"], ".0f"),
    ]
    return ["–" if math.isnan(value) else format(value, form) for value, form in figures]


def check(args: argparse.Namespace) -> None:
    """Exit with an error message if an argument is invalid."""
    if args.compile_only and not args.contenders:
        sys.exit("--compile-only requires --contenders")
    for name in ("steps", "rounds", "size", "batch_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            sys.exit(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    devices = usable_devices()
    if args.device not in devices:
        sys.exit(f"--device {args.device} is not available; choose one of {', '.join(devices)}")


def usable_devices() -> list[str]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ["cpu"]
    name = accelerator.type
    return [name, *(f"{name}:{index}" for index in range(torch.accelerator.device_count())), "cpu"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--networks", nargs="*", default=list(SHAPES), choices=list(SHAPES), help="networks to train"
    )
    parser.add_argument("--contenders", nargs="*", default=[], help="contenders to train (default: all)")
    parser.add_argument(
        "--compile-only", action="store_true", help="compile the contenders into inductor's cache, and exit"
    )
    parser.add_argument("--device", default=usable_devices()[0], help="device to train on")
    parser.add_argument("--backend", default="inductor", help="torch.compile backend (default: inductor)")
    parser.add_argument("--steps", type=int, default=10, help="number of steps per measurement")
    parser.add_argument("--rounds", type=int, default=5, help="number of measurements of each contender")
    parser.add_argument("--size", type=int, help="crop size (default: the recipe's crop size)")
    parser.add_argument("--batch-size", type=int, help="batch size (default: the recipe's batch size)")
    parser.add_argument(
        "--minutes", type=float, default=8, help="minutes after which no further contender is started"
    )
    parser.add_argument("--out", type=Path, help="write Markdown to this file, and JSON next to it")
    args = parser.parse_args()
    check(args)
    start, device = perf_counter(), Device(args.device)
    if args.compile_only:
        compile_only(args, device)
        return 0
    if precompiled := not device.is_cpu and args.backend == "inductor":
        compile_in_parallel(args, 60 * args.minutes / 2)
    info = environment_info(["accelerate", "lightning"])
    info |= {"device": device.name, "backend": args.backend, "steps": args.steps, "rounds": args.rounds}
    info["compiled code"] = (
        "loaded from inductor's cache" if precompiled else "compiled by the measured process"
    )
    info |= {"crop": args.size or "the recipe's", "batch size": args.batch_size or "the recipe's"}
    results = Results(args.out, info)
    for index, name in enumerate(args.networks):
        remaining = 60 * args.minutes - (perf_counter() - start)
        if remaining <= 0:
            print(f"time limit reached: skipping {', '.join(args.networks[index:])}")
            break
        measure(name, args, device, results, perf_counter() + remaining / (len(args.networks) - index))
    print(f"\n{results.write()}")
    return int(
        any(
            "error" in figures and figures["error"] != NOT_MEASURED
            for figures in results.slipstream_figures()
        )
    )


if __name__ == "__main__":
    sys.exit(main())
