"""Measure how long a compiled model takes to complete its first step and validation, with cold and warm caches.

python benchmarks/compile_cache.py --rounds 3 --out benchmarks/results/compile_cache.md
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from report import environment_info, table, write_result
from slipstream.speed.compile import CompileOptions
from slipstream.speed.compile_cache import use_cache
from slipstream.speed.compiled_modules import compile_model

STARTS = {"eager": None, "first start": CompileOptions(), "second start": CompileOptions()}
SCOPES = ("model", "block")


class ConvNet(nn.Module):
    """Residual blocks of convolution, BatchNorm and ReLU, at two widths."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.narrow = nn.Sequential(*(Block(16) for _ in range(depth)))
        self.widen = nn.Conv2d(16, 32, 3, 2, 1)
        self.wide = nn.Sequential(*(Block(32) for _ in range(depth)))
        self.head = nn.Linear(32, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        x: Tensor = self.wide(self.widen(self.narrow(self.stem(inputs))))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


def start(depth: int, options: CompileOptions | None) -> dict[str, Any]:
    """Return the seconds until the first step and validation have finished, the loss, and inductor's cache hits."""
    torch.manual_seed(0)
    net, inputs, targets = ConvNet(depth), torch.randn(4, 3, 64, 64), torch.arange(4)
    start_time = perf_counter()
    if options is not None:
        use_cache(options.cache, sys.exit)
        compile_model(net, options, sys.exit)
    loss = F.cross_entropy(net(inputs), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    net.eval()
    with torch.no_grad():
        net(inputs)
    seconds = perf_counter() - start_time
    counts = torch._dynamo.utils.counters["inductor"]
    hits, misses = counts["fxgraph_cache_hit"], counts["fxgraph_cache_miss"]
    found = "-" if options is None else f"{hits} of {hits + misses}"
    return {"seconds": seconds, "loss": float(loss), "found": found}


def measure(depth: int, scope: str, rounds: int, threads: int) -> dict[str, list[dict[str, Any]]]:
    """Measure each startup in its own process, one after another. Each round begins with an empty cache."""
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in STARTS}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "SLIPSTREAM_CACHE": folder, "OMP_NUM_THREADS": str(threads)}
            environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
            for name, results in measured.items():
                command = [sys.executable, __file__, "--depth", str(depth), "--start", name, "--scope", scope]
                process = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
                results.append(json.loads(process.stdout.splitlines()[-1]))
    return measured


def rows(scope: str, measured: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    medians = {name: statistics.median(r["seconds"] for r in results) for name, results in measured.items()}
    return [
        [
            f"{scope}, {name}",
            f"{seconds:.2f}",
            f"{seconds / medians['first start']:.2f}",
            measured[name][0]["found"],
        ]
        for name, seconds in medians.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--depth", type=int, default=6, help="number of blocks of each width")
    parser.add_argument("--rounds", type=int, default=3, help="number of times to measure each startup")
    parser.add_argument("--threads", type=int, default=2, help="number of torch threads")
    parser.add_argument("--out", type=Path, help="write Markdown to this file, and JSON next to it")
    parser.add_argument("--start", choices=STARTS, help=argparse.SUPPRESS)
    parser.add_argument("--scope", choices=SCOPES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start:
        options = STARTS[args.start]
        print(json.dumps(start(args.depth, options and replace(options, scope=args.scope))))
        return
    torch.set_num_threads(args.threads)
    info = {**environment_info(["slipstream"]), "depth": args.depth, "n (rounds)": args.rounds}
    measured = {scope: measure(args.depth, scope, args.rounds, args.threads) for scope in SCOPES}
    header = [
        "start of a fresh process",
        "seconds, median",
        "relative to the first start",
        "code found in the cache",
    ]
    text = table(header, [row for scope in SCOPES for row in rows(scope, measured[scope])])
    text += (
        "\n\nThe measurement starts when the model has been created, and ends after its first training step and"
        " validation. It includes tracing, compilation and the steps, but not importing torch. The second start traces"
        " the model again and loads the compiled code from the cache."
    )
    print(text)
    if args.out:
        write_result(args.out, "Cold and warm startup of a compiled model", info, text, {"starts": measured})


if __name__ == "__main__":
    sys.exit(main())
