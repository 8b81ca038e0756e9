"""Measure the optimizer step of a ResNet-18 with fused kernels, foreach kernels, and a loop over the parameters.

python benchmarks/fused.py --rounds 21 --out benchmarks/results/fused.md
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import nn
from torch.optim import Optimizer

from report import environment_info, table, write_result
from slipstream.optim.kernels import fuse

KINDS: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda params, **kwargs: torch.optim.SGD(
        params, lr=1e-3, momentum=0.9, weight_decay=1e-4, **kwargs
    ),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
}
KERNELS = ("loop", "foreach", "fused")


def resnet18_shapes() -> Iterator[tuple[int, ...]]:
    """Yield the shapes of the 62 parameters of ResNet-18 (11.7 million values)."""

    def conv_bn(inputs: int, outputs: int, size: int) -> Iterator[tuple[int, ...]]:
        yield (outputs, inputs, size, size)
        yield from ((outputs,), (outputs,))

    yield from conv_bn(3, 64, 7)
    inputs = 64
    for width in (64, 128, 256, 512):
        yield from conv_bn(inputs, width, 3)
        yield from conv_bn(width, width, 3)
        if inputs != width:
            yield from conv_bn(inputs, width, 1)
        yield from conv_bn(width, width, 3)
        yield from conv_bn(width, width, 3)
        inputs = width
    yield from ((1000, 512), (1000,))


def make_optimizer(kind: str, kernels: str) -> Optimizer:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(0.1 * torch.randn(shape, generator=generator)) for shape in resnet18_shapes()]
    for param in params:
        param.grad = 0.01 * torch.randn(param.shape, generator=generator)
    if kernels == "fused":
        optimizer = KINDS[kind](params)
        fuse(optimizer, True)
        return optimizer
    return KINDS[kind](params, foreach=kernels == "foreach")


def measure(kind: str, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds per step. The contenders take turns, so machine load affects all of them equally."""
    optimizers = {kernels: make_optimizer(kind, kernels) for kernels in KERNELS}
    for optimizer in optimizers.values():
        optimizer.step()
    times: dict[str, list[float]] = {kernels: [] for kernels in KERNELS}
    for _ in range(rounds):
        for kernels, optimizer in optimizers.items():
            start = perf_counter()
            optimizer.step()
            times[kernels].append(1e3 * (perf_counter() - start))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21, help="number of steps per contender")
    parser.add_argument("--threads", type=int, default=1, help="number of torch threads")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("benchmarks/results/fused.md"),
        help="Markdown file for the result; JSON is written next to it",
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    times = {kind: measure(kind, args.rounds) for kind in KINDS}
    rows = []
    for kind, kernel_times in times.items():
        medians = {kernels: median(values) for kernels, values in kernel_times.items()}
        rows.append(
            [
                kind,
                *(f"{medians[kernels]:.1f}" for kernels in KERNELS),
                f"{medians['fused'] / medians['loop']:.2f}",
            ]
        )
    text = table(["ms per step, median", *KERNELS, "fused / loop"], rows)
    print(text)
    write_result(
        args.out,
        "Optimizer steps with the parameters of a ResNet-18",
        environment_info(),
        text,
        {"times_ms": times},
    )


if __name__ == "__main__":
    main()
