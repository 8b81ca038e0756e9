"""Record the resident memory during a long training run with the default hooks, to detect leaks.

python benchmarks/memory.py --steps 100000 --out benchmarks/results/memory.md
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from report import environment_info, table, write_result
from slipstream.hooks import Hook
from slipstream.model import BaseModel
from slipstream.runner import Runner

BATCH_SIZE = 8
STEPS_PER_EPOCH = 1000
THREADS = 2
WARM_UP = 0.2
"""Fraction of the steps after which caches and bounded histories are assumed to be full."""


class TinyMLP(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, inputs: Tensor, targets: Tensor, mode: str) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.net(inputs), targets)}


class MemoryHook(Hook):
    """Record the resident memory in bytes every `interval` steps."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.resident: dict[int, int] = {}

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        if self.every_n_train_iters(runner, self.interval):
            self.resident[runner.iter + 1] = resident_bytes()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])  # Linux
    return pages * resource.getpagesize()


def train(steps: int) -> dict[int, int]:
    """Train for `steps` steps, and return the resident memory in bytes after each tenth of the steps."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(STEPS_PER_EPOCH * BATCH_SIZE, 16, generator=generator)
    targets = torch.randint(0, 4, (len(inputs),), generator=generator)
    memory = MemoryHook(steps // 10)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(Path(folder, "stdout.txt").open("w")):
        runner = Runner(
            TinyMLP(),
            folder,
            train_dataloader=dict(
                dataset=TensorDataset(inputs, targets), batch_size=BATCH_SIZE, shuffle=True
            ),
            train_cfg=dict(by_epoch=True, max_epochs=steps // STEPS_PER_EPOCH),
            optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.01, momentum=0.9)),
            custom_hooks=[memory],
            randomness=dict(seed=0),
        )
        runner.train()
        runner.visualizer.close()
    return memory.resident


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100_000, help="number of steps, a multiple of 10,000")
    parser.add_argument("--out", type=Path, help="write Markdown to this file, and JSON next to it")
    args = parser.parse_args()
    if args.steps < 10_000 or args.steps % 10_000:
        parser.error("--steps must be a multiple of 10,000")
    torch.set_num_threads(THREADS)
    info = {**environment_info(["slipstream"]), "steps": args.steps, "n (runs)": 1}
    start = perf_counter()
    resident = train(args.steps)
    info["seconds"] = round(perf_counter() - start, 1)
    warmup_steps = round(args.steps * WARM_UP)
    growth = (resident[args.steps] - resident[warmup_steps]) / (args.steps - warmup_steps)
    rows = [[f"{step:,}", f"{size / 2**20:.2f}"] for step, size in resident.items()]
    text = table(["step", "resident MiB"], rows)
    text += f"\n\nGrowth after the first {warmup_steps:,} steps: {growth:.2f} bytes per step."
    print(text)
    if args.out:
        data = {"resident_bytes": resident, "growth_bytes_per_step": growth}
        write_result(args.out, "Memory over a long training run", info, text, data)


if __name__ == "__main__":
    sys.exit(main())
