"""Compare the step times of 2 and 4 processes with predictions from single-process times and microbenchmarks.

    python benchmarks/scaling.py --rounds 3 --out benchmarks/results/scaling.md

Each round measures one process while the others wait, then all processes independently (side by side), then distributed
training. `scaling_prediction.py` predicts the times from only the single-process step times and the collective
microbenchmarks. Side-by-side steps do not communicate, so they show which part of the error comes from the machine
model and which from the communication model. The minimum over the rounds is used, because other programs can only
increase the times.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from report import environment_info, table, write_result
from scaling_prediction import Block, Cluster, Link, Prediction, Strategy, describe, predict, total
from slipstream.model import sync_batchnorm
from slipstream.model.sync_batchnorm import convert_sync_batchnorm
from slipstream.zoo import pp_lite_t_seg, resnet18

SIZES = [2**16, 2**18, 2**20, 2**22, 2**24]
"""Message sizes of the collective microbenchmarks in bytes, similar to the sizes of DDP buckets and FSDP2 units."""
PROCESSES = (2, 4)
CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Case:
    network: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    steps: int
    fsdp_units: Callable[[nn.Module], list[nn.Module]]
    """Function that returns the modules that FSDP2 shards and gathers, each as one unit."""


def mlp() -> nn.Module:
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers)


def linear_layers(net: Any) -> list[nn.Module]:
    return [module for module in net if isinstance(module, nn.Linear)]


def residual_blocks(net: Any) -> list[nn.Module]:
    return [block for n in range(1, 5) for block in getattr(net, f"layer{n}")]


def stdc_blocks(net: Any) -> list[nn.Module]:
    return [block for stage in net.encoder.backbone.stages.values() for block in stage]


small_resnet18 = partial(resnet18, num_classes=10, small_input=True)
small_pp_lite_t = partial(pp_lite_t_seg, use_aux_heads=False)
CASES = {
    "MLP": Case(mlp, (1024,), 32, 8, linear_layers),
    "ResNet-18": Case(small_resnet18, (3, 32, 32), 4, 2, residual_blocks),
    "PP-LiteSeg-T": Case(small_pp_lite_t, (3, 128, 256), 2, 2, stdc_blocks),
}
DDP, SYNC_BN, FSDP2 = STRATEGIES = ("DDP", "DDP, SyncBN", "FSDP2")


def strategies_of(network: str) -> list[str]:
    return [name for name in STRATEGIES if network != "MLP" or name != SYNC_BN]


# ---- processes


def trainer(case: Case, strategy: str, mesh: DeviceMesh) -> Callable[[], None]:
    """Return a function that trains for `case.steps` steps, either in all processes together or in a single process
    without communication.
    """
    alone = mesh.size() == 1
    torch.manual_seed(0)
    net: nn.Module = case.network().train()
    if strategy == SYNC_BN:
        net = convert_sync_batchnorm(net)
    if strategy == FSDP2:
        for module in [*case.fsdp_units(net), net]:
            fully_shard(module, mesh=mesh)
    elif not alone:
        net = DistributedDataParallel(net, gradient_as_bucket_view=True, broadcast_buffers=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
    inputs = torch.randn(case.batch, *case.shape)

    def train() -> None:
        with silent_sync_bn() if alone else nullcontext():
            for _ in range(case.steps):
                optimizer.zero_grad()
                net(inputs).square().mean().backward()
                optimizer.step()

    return train


def silent_sync_bn() -> Any:
    """Run SyncBN without communication."""
    return patch.object(sync_batchnorm.collectives, "all_reduce", lambda values, *_: values)


def seconds_of(function: Callable[[], Any]) -> float:
    start = perf_counter()
    function()
    return perf_counter() - start


def synchronized_seconds(function: Callable[[], Any]) -> float:
    """Return the mean duration in seconds of a function that all processes call repeatedly at the same time."""
    times = 50
    dist.barrier()
    return seconds_of(lambda: [function() for _ in range(times)]) / times


def collective_times(rank: int, pair: Any) -> dict[str, Any]:
    """Return the duration in seconds of two-process collectives for each size, and of a minimal all-reduce.

    The minimal all-reduce runs over all processes. It is measured between computations, as in training, where
    processes sleep, wake up and arrive at different times.
    """
    matrix, number = torch.ones(256, 256), torch.zeros(1)

    def compute() -> None:
        for _ in range(4):
            matrix @ matrix

    def compute_and_sum() -> None:
        compute()
        dist.all_reduce(number)

    measurements: dict[str, Any] = {
        "smallest": synchronized_seconds(compute_and_sum) - synchronized_seconds(compute)
    }
    for size in SIZES:
        whole, part = torch.ones(size // 4), torch.empty(size // 8)
        times = max(5, min(30, 2**25 // size))
        calls = {
            "all_reduce": partial(dist.all_reduce, whole, group=pair),
            "all_gather": partial(dist.all_gather_into_tensor, whole, part, group=pair),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole, group=pair),
        }
        for name, call in calls.items():
            if rank < 2:
                call()
                measurements.setdefault(name, []).append(median(seconds_of(call) for _ in range(times)))
    dist.barrier()
    return measurements


def process(rank: int, processes: int, rounds: int, folder: str) -> None:
    """Run all measurements in this process. Rank 0 writes the results."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store{processes}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes)
    pair, lone = dist.new_group([0, 1]), [dist.new_group([r]) for r in range(processes)]
    meshes = DeviceMesh.from_group(lone[rank], "cpu"), init_device_mesh("cpu", (processes,))
    measurements: dict[str, Any] = {"pings": [], "steps": []}
    trainers: dict[tuple[str, str], list[Callable[[], None]]] = {}
    for name, case in CASES.items():
        for strategy in strategies_of(name):
            trainers[name, strategy] = [trainer(case, strategy, mesh) for mesh in meshes]
            for train in trainers[name, strategy]:
                train()
    for _ in range(rounds):
        measurements["pings"].append(collective_times(rank, pair))
        measurements["steps"].append({})
        for (name, strategy), (without_communication, distributed) in trainers.items():
            times = {}
            for mode, train in (
                ("alone", without_communication),
                ("side by side", without_communication),
                ("all", distributed),
            ):
                dist.barrier()
                if rank == 0 or mode != "alone":
                    times[mode] = seconds_of(train) / CASES[name].steps
            measurements["steps"][-1][f"{name}, {strategy}"] = times
    dist.barrier()
    if rank == 0:
        Path(folder, f"{processes}.json").write_text(json.dumps(measurements))
    dist.destroy_process_group()


def measure(rounds: int) -> dict[int, dict[str, Any]]:
    """Return the collective microbenchmarks and the step times of each round, by number of processes."""
    measurements = {}
    with tempfile.TemporaryDirectory() as folder:
        for processes in PROCESSES:
            mp.spawn(process, (processes, rounds, folder), nprocs=processes)
            measurements[processes] = json.loads(Path(folder, f"{processes}.json").read_text())
    return measurements


# ---- predictions


def cluster_of(rounds: list[dict[str, Any]], processes: int) -> Cluster:
    """Model the machine as a cluster whose processes share the cores and slow down equally.

    An all-reduce between two processes takes `2 alpha + n beta`. Gathers and scatters send half as much data; any
    additional time is local work.
    """
    min_seconds = {
        name: [min(ping[name][i] for ping in rounds) for i in range(len(SIZES))]
        for name in ("all_reduce", "all_gather", "reduce_scatter")
    }
    share = max(1.0, processes / CORES)
    slopes = {name: seconds_per_byte(seconds) for name, seconds in min_seconds.items()}
    beta = slopes["all_reduce"]
    gather, scatter = (max(0.0, slopes[name] - beta / 2) for name in ("all_gather", "reduce_scatter"))
    alpha = min_seconds["all_reduce"][0] / 2
    # `smallest` is the difference of two noisy timings, so its minimum would be biased low. Use the median.
    smallest, hops = median(ping["smallest"] for ping in rounds), 2 * (processes - 1)
    alpha = min(alpha, smallest / hops)  # the smallest all-reduce consists only of hops and a launch
    return Cluster(
        gpus=processes,
        gpus_per_node=processes,
        intra=Link(alpha, share * beta, alpha),
        inter=Link(alpha, share * beta, alpha),
        # The next two values only determine how the measured step time is divided among the blocks.
        flops=100e9,
        memory_bandwidth=10e9,
        memory=1e12,
        launch=smallest - hops * alpha,
        gamma={"all_gather": share * gather, "reduce_scatter": share * scatter},
        overlap=min(1.0, max(0.0, CORES / processes - 1)),
    )


def seconds_per_byte(seconds: list[float]) -> float:
    """Return the slope of the fit `seconds[0] + slope * size` to the other times (relative least squares)."""
    start = seconds[0]
    points = [(size / t, (t - start) / t) for size, t in zip(SIZES, seconds, strict=True)][1:]
    return max(0.0, sum(x * y for x, y in points) / sum(x * x for x, _ in points))


def blocks_of(case: Case, grouped: bool) -> list[Block]:
    """Return the blocks of the network. If `grouped` is True, merge the blocks of each FSDP2 unit.

    The FSDP2 units are the modules that FSDP2 wraps. Another unit contains all remaining blocks.
    """
    net = case.network()
    blocks = describe(net, case.shape)
    if not grouped:
        return blocks
    names = {module: name for name, module in net.named_modules()}
    prefixes = [names[module] for module in case.fsdp_units(net)]
    groups: dict[str, list[Block]] = {"the rest": []}
    for block in blocks:
        matches = [p for p in prefixes if block.name == p or block.name.startswith(f"{p}.")]
        groups.setdefault(matches[0] if matches else "the rest", []).append(block)
    return [
        Block(name, *(total(group, attribute) for attribute in ("parameters", "flops", "activations")))
        for name, group in groups.items()
        if group
    ]


def compare(measurements: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each network, strategy and number of processes."""
    rows = []
    for processes, measured in measurements.items():
        cluster = cluster_of(measured["pings"], processes)
        for name, case in CASES.items():
            for strategy in strategies_of(name):
                times = [steps[f"{name}, {strategy}"] for steps in measured["steps"]]
                alone, side_by_side, step = (
                    min(time[mode] for time in times) for mode in ("alone", "side by side", "all")
                )
                prediction, informed_prediction = (
                    predict_step(case, strategy, cluster, seconds)
                    for seconds in (alone * max(1.0, processes / CORES), side_by_side)
                )
                rows.append(
                    {
                        "network": name,
                        "strategy": strategy,
                        "processes": processes,
                        "alone": alone,
                        "beside": side_by_side,
                        "predicted": prediction.step_time,
                        "exposed": prediction.exposed,
                        "measured": step,
                        "error": prediction.step_time / step - 1,
                        "informed_error": informed_prediction.step_time / step - 1,
                    }
                )
    return rows


def predict_step(case: Case, strategy: str, cluster: Cluster, compute_seconds: float) -> Prediction:
    options = Strategy(
        "fsdp2" if strategy == FSDP2 else "ddp",
        sync_bn=strategy == SYNC_BN,
        parameter_bytes=4,
        activation_bytes=4,
        state_bytes=4,
        unit_parameters=0,
        noise=0.0,
    )
    return predict(blocks_of(case, strategy == FSDP2), cluster, options, case.batch, compute_seconds)


def summary(rows: list[dict[str, Any]], measurements: dict[int, dict[str, Any]]) -> str:
    header = ["ms per step", "processes", "alone", "side by side", "exposed communication", "predicted",
              "measured", "error", "error when predicting from side-by-side times"]  # fmt: skip
    cells = [
        [
            f"{row['network']}, {row['strategy']}",
            row["processes"],
            *(f"{row[key] * 1e3:.1f}" for key in ("alone", "beside", "exposed", "predicted", "measured")),
            *(f"{row[key]:+.0%}" for key in ("error", "informed_error")),
        ]
        for row in rows
    ]
    lines = [table(header, cells), ""]
    for processes, measured in measurements.items():
        errors, informed = (
            [abs(row[key]) for row in rows if row["processes"] == processes]
            for key in ("error", "informed_error")
        )
        c = cluster_of(measured["pings"], processes)
        lines.append(
            f"- {processes} processes: median absolute error {median(errors):.0%}, largest {max(errors):.0%} "
            f"(from side-by-side times: {median(informed):.0%}, {max(informed):.0%}); "
            f"alpha {c.intra.alpha * 1e6:.0f} us, beta {c.intra.beta * 1e9:.2f} s/GB, "
            f"launch {c.launch * 1e3:.2f} ms"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--rounds", type=int, default=4, help="number of measurements of each step (at least 2)"
    )
    parser.add_argument("--out", type=Path, help="write Markdown to this file, and JSON next to it")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds must be at least 2")
    torch.set_num_threads(1)
    info = environment_info(["slipstream"]) | {"cores for the processes": CORES, "n (rounds)": args.rounds}
    start = perf_counter()
    measurements = measure(args.rounds)
    info["seconds"] = round(perf_counter() - start)
    rows = compare(measurements)
    text = summary(rows, measurements)
    print(text)
    if args.out:
        data = {"rows": rows, "found": measurements}
        write_result(args.out, "Predicted and measured step times", info, text, data)


if __name__ == "__main__":
    sys.exit(main())
