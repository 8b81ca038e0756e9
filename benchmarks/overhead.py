"""Compare step times of frameworks and a plain loop for tiny networks, where framework overhead dominates.

    python benchmarks/overhead.py --steps 1500 --rounds 5 --out benchmarks/results/overhead.md

In each round, every contender trains a fresh copy of the network for one epoch (with `--compiled`, for two epochs, the
second of which is timed). The order rotates between rounds, and differences are computed within each round, so that
changes in machine speed affect all contenders equally.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from contenders import COMPILED, CONTENDERS, installed_contenders
from report import environment_info, table, write_result
from slipstream.cli.peers import Work

BATCH_SIZE = 8
CLASSES = 4
GOAL_MS = 0.04
CHECKED_STEPS = 50

Contenders = dict[str, Callable[[Work], None]]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, CLASSES))


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (mlp, (16,)),
    "conv net": (conv_net, (3, 16, 16)),
}
"""Builder and input shape of each network."""


class Samples(Dataset[Any]):
    """A typical user dataset that returns individual samples."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class ReadyBatches(IterableDataset[Any]):
    """Precomputed batches in a fixed order, so only the training step is measured."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.batches = [
            list(b) for b in zip(inputs.split(BATCH_SIZE), targets.split(BATCH_SIZE), strict=True)
        ]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Tensor]]:
        return iter(self.batches)


LOADERS: dict[str, Callable[[Tensor, Tensor, bool], DataLoader[Any]]] = {
    "TensorDataset": lambda x, y, shuffle: DataLoader(TensorDataset(x, y), BATCH_SIZE, shuffle=shuffle),
    "custom dataset": lambda x, y, shuffle: DataLoader(Samples(x, y), BATCH_SIZE, shuffle=shuffle),
    "ready batches": lambda x, y, shuffle: DataLoader(ReadyBatches(x, y), batch_size=None),
}


def make_loader(kind: str, shape: tuple[int, ...], steps: int, shuffle: bool) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(BATCH_SIZE * steps, *shape, generator=generator)
    targets = torch.randint(0, CLASSES, (BATCH_SIZE * steps,), generator=generator)
    return LOADERS[kind](inputs, targets, shuffle)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


def train(
    contender: Callable[[Work], None],
    network: str,
    loader: DataLoader[Any],
    criterion: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    epochs: int = 1,
) -> tuple[float, nn.Module]:
    """Return the duration of the last epoch in seconds, and the trained network."""
    torch.manual_seed(0)
    net, threads = NETWORKS[network][0](), torch.get_num_threads()
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, suppress_output():
        gc.collect()
        loss = lambda net, batch: criterion(net(batch[0]), batch[1])  # noqa: E731
        work = Work(net, loader, loss, sgd, folder, clock.after_step, epochs=epochs)
        contender(work)
    assert torch.get_num_threads() == threads, "a framework changed the number of torch threads"
    return clock.seconds(len(loader)), net


class Clock:
    """Records the end of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def after_step(self, loss: Tensor) -> None:
        self.ends.append(perf_counter())

    def seconds(self, steps: int) -> float:
        """Return the duration of the last `steps` steps, extrapolated from all but the first of them."""
        last = self.ends[-steps:]
        return (last[-1] - last[0]) * steps / (steps - 1)


@contextmanager
def suppress_output() -> Iterator[None]:
    with warnings.catch_warnings(), redirect_stdout(_DEV_NULL), redirect_stderr(_DEV_NULL):
        warnings.simplefilter("ignore")
        yield


_DEV_NULL = Path(os.devnull).open("w")  # noqa: SIM115  # MMEngine's loggers use this file until the process ends


def check_same_training(contenders: Contenders, network: str, kind: str) -> dict[str, float]:
    """Train each contender for a few steps on samples in a fixed order; return the weight differences from the loop.

    Raises:
        AssertionError: if losses or weights differ by more than rounding errors.
    """
    outcomes = {}
    for name, contender in contenders.items():
        losses: list[float] = []

        def criterion(logits: Tensor, targets: Tensor, losses: list[float] = losses) -> Tensor:
            loss = F.cross_entropy(logits, targets)
            losses.append(loss.item())
            return loss

        loader = make_loader(kind, NETWORKS[network][1], CHECKED_STEPS, shuffle=False)
        _, net = train(contender, network, loader, criterion)
        weights = torch.cat([value.detach().flatten().double() for value in net.state_dict().values()])
        outcomes[name] = torch.tensor(losses), weights
    loop_losses, loop_weights = outcomes["loop"]
    assert len(loop_losses) == CHECKED_STEPS
    differences = {}
    for name, (contender_losses, weights) in outcomes.items():
        torch.testing.assert_close(
            contender_losses, loop_losses, rtol=1e-4, atol=1e-5, msg=f"{name}: losses differ from the loop's"
        )
        torch.testing.assert_close(
            weights, loop_weights, rtol=1e-4, atol=1e-5, msg=f"{name}: weights differ from the loop's"
        )
        differences[name] = float((weights - loop_weights).abs().max())
    return differences


def check_same_weights(contenders: Contenders, network: str, kind: str) -> dict[str, float]:
    """Return the weight difference between each compiled contender and the loop.

    The losses are not compared, because they cannot be read inside a graph.

    Raises:
        AssertionError: if weights differ by more than rounding errors.
    """
    weights = {}
    for name, contender in contenders.items():
        _, net = train(
            contender, network, make_loader(kind, NETWORKS[network][1], CHECKED_STEPS, shuffle=False)
        )
        weights[name] = torch.cat([value.detach().flatten().double() for value in net.state_dict().values()])
    for name, values in weights.items():
        torch.testing.assert_close(
            values, weights["loop"], rtol=1e-4, atol=1e-5, msg=f"{name}: weights differ from the loop's"
        )
    return {name: float((values - weights["loop"]).abs().max()) for name, values in weights.items()}


def measure(
    contenders: Contenders, network: str, kind: str, steps: int, rounds: int, epochs: int = 1
) -> dict[str, list[float]]:
    """Return the milliseconds per step for each contender and round."""
    loader = make_loader(kind, NETWORKS[network][1], steps, shuffle=True)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for index in range(rounds):
        offset = index % len(order)
        for name in order[offset:] + order[:offset]:
            seconds, _ = train(contenders[name], network, loader, epochs=epochs)
            times[name].append(seconds / steps * 1e3)
        line = ", ".join(f"{name} {values[-1]:.3f}" for name, values in times.items())
        print(f"{network}, {kind}, round {index + 1}/{rounds}: {line}", flush=True)
    return times


def summary(times: dict[str, list[float]]) -> str:
    """Return the table of a case, and the number of rounds in which Slipstream meets each goal.

    The goals are to be faster than Accelerate, and at most `GOAL_MS` slower than the loop.
    """
    differences = {
        name: [a - b for a, b in zip(values, times["loop"], strict=True)] for name, values in times.items()
    }
    rows = [
        [name, *(f"{f(values):.3f}" for f in (median, min, max)), f"{median(differences[name]):+.3f}"]
        for name, values in times.items()
    ]
    text = table(["", "median ms", "min", "max", "difference from the loop (median)"], rows)
    rounds = len(times["loop"])
    if "Accelerate" in times:
        faster_rounds = sum(s < a for s, a in zip(times["Slipstream"], times["Accelerate"], strict=True))
        text += f"\n\nSlipstream is faster than Accelerate in {faster_rounds} of {rounds} rounds."
    slipstream = next(name for name in times if name.startswith("Slipstream"))
    for name in [name for name in times if name != slipstream] if slipstream not in CONTENDERS else []:
        ratios = [a / b for a, b in zip(times[slipstream], times[name], strict=True)]
        text += f"\n\n{slipstream} / {name}: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})."
    if slipstream not in CONTENDERS:
        return text
    rounds_in_goal = sum(difference <= GOAL_MS for difference in differences[slipstream])
    return (
        text
        + f"\n\nSlipstream is at most {GOAL_MS} ms slower than the loop in {rounds_in_goal} of {rounds} rounds."
    )


def run_case(contenders: Contenders, network: str, kind: str, steps: int, rounds: int) -> dict[str, Any]:
    compiled = contenders is COMPILED
    check = check_same_weights if compiled else check_same_training
    return {
        "network": network,
        "loader": kind,
        "largest weight difference from the loop": check(contenders, network, kind),
        "milliseconds": measure(contenders, network, kind, steps, rounds, epochs=2 if compiled else 1),
    }


def describe(case: dict[str, Any]) -> str:
    difference = max(case["largest weight difference from the loop"].values())
    return (
        f"## {case['network']}, {case['loader']}\n\n{summary(case['milliseconds'])}\n\n"
        f"Largest difference from the loop in any weight after {CHECKED_STEPS} steps: {difference:.1e}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000, help="training steps per epoch")
    parser.add_argument("--rounds", type=int, default=5, help="number of measurements of each contender")
    parser.add_argument("--threads", type=int, default=2, help="number of torch threads of each contender")
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="compare a loop that uses torch.compile(model) with Slipstream's step compiled as one graph",
    )
    parser.add_argument("--out", type=Path, help="write Markdown to this file, and JSON next to it")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    contenders = COMPILED if args.compiled else installed_contenders()
    info = environment_info(package for package, _ in CONTENDERS.values() if package != "torch")
    info |= {"batch size": BATCH_SIZE, "steps": args.steps, "n (rounds)": args.rounds}
    run = partial(run_case, contenders, steps=args.steps, rounds=args.rounds)
    cases = [run(network, kind) for kind in LOADERS for network in NETWORKS]
    text = "\n\n".join(describe(case) for case in cases)
    print(f"\n{text}")
    if args.out:
        title = "Overhead per training step" + (", compiled" if args.compiled else "")
        write_result(args.out, title, info, text, {"cases": cases})


if __name__ == "__main__":
    sys.exit(main())
