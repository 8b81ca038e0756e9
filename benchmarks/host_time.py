"""Compare the host time of the compiled step with that of `jax.jit`, for networks so small that host time dominates.

    python benchmarks/host_time.py --rounds 9 --out benchmarks/results/host_time.md

All contenders are interleaved in one process. The process is bound to one core, because JAX dispatches work to its own
threads. Ratios are computed within each round. JAX is optional (`pip install jax`, part of the `bench` extra). If JAX
is not installed, the result says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable
from statistics import median
from time import perf_counter, process_time
from typing import Any, NamedTuple

if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
# Set these before importing jax, which reads them only once. JAX then uses one thread, as torch does.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overhead import conv_net, mlp
from report import environment_info, table, write_result
from slipstream import accelerate

JAX = importlib.util.find_spec("jax") is not None
BATCH_SIZE, CLASSES, CHECKED_STEPS = 8, 4, 10
SLIPSTREAM, JAX_JIT = "Slipstream, one graph", "jax.jit"


def many_tensors() -> nn.Sequential:
    """Return 25 blocks of Linear and BatchNorm, and a head (102 parameter tensors in total)."""
    blocks = [(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(25)]
    return nn.Sequential(*[layer for block in blocks for layer in block], nn.Linear(16, CLASSES))


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-4)


class Case(NamedTuple):
    build: Callable[[], Any]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    shape: tuple[int, ...]


CASES = {
    "MLP, SGD": Case(mlp, sgd, (16,)),
    "conv net, SGD": Case(conv_net, sgd, (3, 16, 16)),
    "25 x (Linear, BatchNorm), AdamW": Case(many_tensors, adamw, (16,)),
}
Step = Callable[[Any], Any]


def net_and_optimizer(case: Case) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = case.build().train()
    return net, case.optimizer(net)


def loop(case: Case) -> Step:
    net, optimizer = net_and_optimizer(case)

    def step(batch: Any) -> Tensor:
        loss = F.cross_entropy(net(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def one_graph(case: Case) -> Step:
    net, optimizer = net_and_optimizer(case)
    options = {"scope": "step", "cache": False}
    train = accelerate(net, optimizer, F.cross_entropy, speed={"compile": options})
    return lambda batch: train(batch)["loss"]


def with_jax(case: Case) -> Step:
    from jax_step import jax_step

    return jax_step(*net_and_optimizer(case))


CONTENDERS: dict[str, Callable[[Case], Step]] = {"loop": loop, SLIPSTREAM: one_graph}
if JAX:
    CONTENDERS[JAX_JIT] = with_jax


def batches(case: Case, count: int = 16) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(BATCH_SIZE, *case.shape, generator=generator),
            torch.randint(0, CLASSES, (BATCH_SIZE,), generator=generator),
        )
        for _ in range(count)
    ]


def measure(case: Case, rounds: int, seconds: float) -> dict[str, list[tuple[float, float]]]:
    """Return the wall and CPU time per step in microseconds for each contender and round.

    Raises:
        AssertionError: if the losses of the first steps differ by more than rounding errors.
    """
    data: dict[str, list[Any]] = dict.fromkeys(CONTENDERS, batches(case))
    if JAX:
        from jax_step import to_jax

        data[JAX_JIT] = [(to_jax(x), to_jax(y)) for x, y in data[JAX_JIT]]
    steps, expected = {}, None
    for name, contender in CONTENDERS.items():
        torch._dynamo.reset()
        step = steps[name] = contender(case)
        losses = torch.tensor([float(step(batch)) for batch in data[name][:CHECKED_STEPS]])
        expected = losses if expected is None else expected
        torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    order = list(steps)
    counts = {
        name: max(1, round(seconds * 1e6 / time_steps(steps[name], data[name], 50)[0])) for name in order
    }
    for index in range(rounds):
        offset = index % len(order)
        for name in order[offset:] + order[:offset]:
            times[name].append(time_steps(steps[name], data[name], counts[name]))
    return times


def time_steps(step: Step, data: list[Any], count: int) -> tuple[float, float]:
    wall, cpu = perf_counter(), process_time()
    for index in range(count):
        loss = step(data[index % len(data)])
    float(loss)
    return (perf_counter() - wall) / count * 1e6, (process_time() - cpu) / count * 1e6


def describe(cases: dict[str, dict[str, list[tuple[float, float]]]]) -> str:
    rows = []
    for name, times in cases.items():
        row: list[Any] = [name]
        for values in times.values():
            wall, cpu = zip(*values, strict=True)
            row.append(f"{median(wall):.0f} ({min(wall):.0f} to {max(wall):.0f}); {median(cpu):.0f}")
        for other in [other for other in times if other != SLIPSTREAM]:
            ratios = [a[0] / b[0] for a, b in zip(times[SLIPSTREAM], times[other], strict=True)]
            row.append(f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        rows.append(row)
    names = list(next(iter(cases.values())))
    header = ["", *(f"{name}, us" for name in names), *(f"one graph / {n}" for n in names if n != SLIPSTREAM)]
    return table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="number of measurements of each contender")
    parser.add_argument("--seconds", type=float, default=0.3, help="seconds per contender and round")
    parser.add_argument("--out", help="write Markdown to this file, and JSON next to it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    info = environment_info(["jax", "jaxlib"]) | {"n (rounds)": args.rounds, "batch size": BATCH_SIZE}
    cases = {}
    for name, case in CASES.items():
        cases[name] = measure(case, args.rounds, args.seconds)
        print(describe({name: cases[name]}), flush=True)
    text = describe(cases)
    text += "\n\nEach cell shows the median wall time per step (minimum to maximum), then the median CPU time. Ratios "
    text += "compare wall times and are medians of the ratios within each round."
    if not JAX:
        text += " JAX was not installed."
    print(f"\n{text}")
    if args.out:
        from pathlib import Path

        write_result(Path(args.out), "Host time of the compiled step", info, text, {"microseconds": cases})


if __name__ == "__main__":
    main()
