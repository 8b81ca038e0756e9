"""Compare SyncBN with one and with two collectives per pass (forward and backward), in two gloo processes.

    python benchmarks/sync_bn.py --rounds 15 --out benchmarks/results/sync_bn.md

The two variants alternate in the same processes. The network consists of thirty 1x1 convolutions, each followed by a
SyncBN layer, so communication dominates.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from report import environment_info, table, write_result
from slipstream.model import convert_sync_batchnorm, sync_batchnorm

VARIANTS = {"two per pass": 0, "one per pass": sync_batchnorm._MAX_GATHERED_VALUES}
STEPS = 4


def network() -> nn.Module:
    layers = [layer for _ in range(30) for layer in (nn.Conv2d(64, 64, 1), nn.BatchNorm2d(64))]
    return convert_sync_batchnorm(nn.Sequential(*layers))


def steps(net: nn.Module, images: torch.Tensor) -> float:
    dist.barrier()
    start = perf_counter()
    for _ in range(STEPS):
        net(images).square().mean().backward()
    return (perf_counter() - start) / STEPS * 1e3


def process(rank: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    net, images = network(), torch.randn(2, 64, 8, 8)
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for index in range(rounds + 1):  # the first round is a warm-up
        for variant, max_values in VARIANTS.items():
            sync_batchnorm._MAX_GATHERED_VALUES = max_values
            milliseconds = steps(net, images)
            if index:
                times[variant].append(milliseconds)
    if rank == 0:
        Path(folder, "times.json").write_text(json.dumps(times))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="number of measurements of each variant")
    parser.add_argument("--out", type=Path, help="write Markdown to this file, and JSON next to it")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    info = environment_info()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(process, (args.rounds, folder), nprocs=2)
        times = json.loads(Path(folder, "times.json").read_text())
    two, one = times.values()
    ratio = median(b / a for a, b in zip(two, one, strict=True))
    text = table(
        ["collectives", "ms per step (median)"],
        [(variant, f"{median(t):.1f}") for variant, t in times.items()],
    )
    text += (
        "\n\nWith one collective in each of the forward and backward passes, a step takes "
        f"{ratio:.2f} times as long as with two (median of the ratios within each round)."
    )
    print(text)
    if args.out:
        write_result(args.out, "SyncBN with one and with two collectives", info, text, times)


if __name__ == "__main__":
    main()
