"""Measure how long training waits while a checkpoint is saved, and how much time verification adds to loading.

python benchmarks/checkpoint.py --rounds 5 --out benchmarks/results/checkpoint.md
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from report import environment_info, table, write_result
from slipstream.checkpoint import BackgroundWriter, load_checkpoint, write_checkpoint

LAYERS, WIDTH = 24, 2048
"""Model size: 24 layers of 2048 x 2048, with 100.7 million parameters (806 MB with momentum)."""


def model_and_state(sharded: bool) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model and a checkpoint of its weights and momentum."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    if sharded:
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    weights = model.state_dict()
    momentum = {name: optimizer.state[p]["momentum_buffer"] for name, p in model.named_parameters()}
    return model, {"meta": {"iter": 1}, "state_dict": weights, "momentum": momentum}


def seconds_of(action: Callable[[], Any]) -> float:
    start = perf_counter()
    action()
    return perf_counter() - start


def save_times(folder: Path, rounds: int, sharded: bool) -> dict[str, list[float]]:
    """Return the duration in seconds of synchronous saves, of starting background saves, and of completing them."""
    _, state = model_and_state(sharded)
    writer = BackgroundWriter()
    times: dict[str, list[float]] = {"synchronous": [], "stall": [], "background": []}
    for index in range(-1, rounds):  # the first round allocates buffers and is not counted
        path = folder / f"{index}.pth"
        synchronous = seconds_of(lambda path=path: write_checkpoint(state, path, print))
        stall = seconds_of(lambda path=path: writer.write(state, path, print, lambda _: None))
        background = seconds_of(writer.wait)
        if index >= 0:
            for name, seconds in zip(times, (synchronous, stall, background), strict=True):
                times[name].append(seconds)
    writer.close()
    return times


def load_times(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Return the duration in seconds of each load, without and with verification."""
    path = folder / "whole.pth"
    write_checkpoint(model_and_state(sharded=False)[1], path, print)
    times: dict[str, list[float]] = {"torch.load": [], "verified": []}
    for _ in range(rounds):
        times["torch.load"].append(seconds_of(lambda: torch.load(path, weights_only=True)))
        times["verified"].append(seconds_of(lambda: load_checkpoint(path)))
    return times


def measure_rank(index: int, port: int, folder: str, rounds: int, results: Any) -> None:
    """Measure saving a model that is sharded across two gloo processes."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(index)}
    dist.init_process_group("gloo", rank=index, world_size=2)
    times = save_times(Path(folder), rounds, sharded=True)
    if index == 0:
        results.update(times)
    dist.barrier()
    dist.destroy_process_group()


def sharded_save_times(folder: Path, rounds: int) -> dict[str, list[float]]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(measure_rank, (port, str(folder), rounds, results), nprocs=2)
        return dict(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="number of measurements")
    parser.add_argument("--out", type=Path, help="write Markdown to this file, and JSON next to it")
    args = parser.parse_args()
    info = environment_info([])
    with tempfile.TemporaryDirectory() as folder:
        saves = {
            "one process": save_times(Path(folder), args.rounds, sharded=False),
            "FSDP2, two gloo processes": sharded_save_times(Path(folder), args.rounds),
        }
        loads = load_times(Path(folder), args.rounds)
    rows = []
    for name, times in saves.items():
        synchronous, stall, background = (median(seconds) for seconds in times.values())
        ratio = median(s / w for s, w in zip(times["stall"], times["synchronous"], strict=True))
        rows.append([name, f"{synchronous:.2f}", f"{stall:.3f}", f"{ratio:.1%}", f"{background:.2f}"])
    text = table(
        ["saving", "synchronous (s)", "training waits (s)", "ratio", "writing in the background (s)"], rows
    )
    plain, verified = (median(seconds) for seconds in loads.values())
    extra = median(v / p for v, p in zip(loads["verified"], loads["torch.load"], strict=True)) - 1
    row = ["from the page cache", f"{plain:.2f}", f"{verified:.2f}", f"{extra:+.1%}"]
    text += "\n\n" + table(["loading", "`torch.load` (s)", "with verification (s)", "difference"], [row])
    print(text)
    if args.out:
        title = "Saving and loading a checkpoint of 100 million parameters with momentum (806 MB)"
        write_result(args.out, title, info, text, {"save": saves, "load": loads})


if __name__ == "__main__":
    main()
