"""Compare training steps whose losses interpolate the logits in strips with steps that store full-resolution logits.

python benchmarks/segmentation_losses.py --scale 2 --clock cpu --threads 1 --rounds 3

The networks, losses and crops are those of the recipes. Both steps are interleaved, and ratios are computed within a
round. The peak memory is the largest sum of the tensors that a step allocates, as recorded by torch's profiler.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import profile

from networks import CLASSES, IGNORE_INDEX, RECIPES, edge_loss
from one_graph import CLOCKS
from report import environment_info, table, write_result
from slipstream import accelerate, losses
from slipstream.zoo import stdc_loss

Step = Callable[[], Tensor]
BATCH_SIZE = 2
CASES = {
    "pp_lite_t_seg75": (edge_loss(3, (1, 1, 1, 1)), (768, 768)),
    "stdc1_seg75": (stdc_loss.STDCLoss(CLASSES, ignore_index=IGNORE_INDEX), (768, 1536)),
    "ddrnet_23": (edge_loss(1, (1, 0.4)), (1024, 1024)),
}


def full_losses(
    outputs: Any, targets: Tensor, weight: None, smoothing: float, ignore_index: int, sums: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The losses and sums of `slipstream.losses`, computed from full-resolution logits."""
    targets = targets.long()
    log_p = F.log_softmax(losses.full(outputs), 1)
    ce = F.nll_loss(log_p, targets, ignore_index=ignore_index, reduction="none")
    if not sums:
        return ce, ce, ce
    valid, hits = hits_of(targets, ignore_index)
    p = log_p.exp() * valid
    return ce, (p * hits).sum((0, 2, 3)), p.sum((0, 2, 3)) + hits.sum((0, 2, 3))


def hits_of(targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return the masks of the valid pixels and of the pixels of each class. All heads of a step share them."""
    if torch.compiler.is_compiling() or _shared.get("targets") is not targets:
        valid = (targets != ignore_index).unsqueeze(1)
        classes = torch.arange(CLASSES).view(-1, 1, 1)
        found = valid, (targets.unsqueeze(1) == classes) & valid
        if torch.compiler.is_compiling():
            return found
        _shared.update(targets=targets, found=found)
    return _shared["found"]


_shared: dict[str, Any] = {}


def full_binary_losses(outputs: Any, truth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits, truth = losses.full(outputs)[:, 0], truth.float()
    p = logits.sigmoid()
    ce = F.binary_cross_entropy_with_logits(logits, truth, reduction="none")
    return ce, (p * truth).sum(), p.sum() + truth.sum()


VARIANTS = {
    "full resolution": (full_losses, full_binary_losses),
    "strips": (losses._pixel_losses, losses.binary_cross_entropy_and_sums),
}


def build(name: str, variant: str, compiled: bool, scale: int) -> Step:
    """Return a step that trains on one batch and returns the loss."""
    loss, (height, width) = CASES[name]
    net = RECIPES[name].build()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
    speed = {"compile": {"scope": "step", "cache": False}} if compiled else None
    train = accelerate(net, optimizer, loss, speed=speed)
    size = (height // scale, width // scale)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(BATCH_SIZE, 3, *size, generator=generator)
    batch = (images, torch.randint(0, CLASSES + 1, (BATCH_SIZE, *size), generator=generator))

    def step() -> Tensor:
        losses._pixel_losses, stdc_loss.binary_cross_entropy_and_sums = VARIANTS[variant]
        return train(batch)["loss"]

    return step


def peak(step: Step) -> float:
    """Return the peak of the memory that a step allocates, in MiB."""
    _shared.clear()
    with profile(profile_memory=True) as prof:
        step()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(sizes)) / 2**20


def measure(name: str, compiled: bool, rounds: int, scale: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Return the seconds per step of each variant and round, the peak memory, and the losses of the first steps."""
    steps = {variant: build(name, variant, compiled, scale) for variant in VARIANTS}
    values = {}
    for variant, step in steps.items():
        torch.manual_seed(0)  # dropout
        values[variant] = [float(step()) for _ in range(2)]
    full, strips = (torch.tensor(values[variant]) for variant in VARIANTS)
    torch.testing.assert_close(strips, full, rtol=1e-4, atol=0)
    seconds: dict[str, list[float]] = {variant: [] for variant in steps}
    for index in range(rounds):
        for variant in list(steps)[:: 1 if index % 2 else -1]:
            _shared.clear()
            start = clock()
            float(steps[variant]())
            seconds[variant].append(clock() - start)
    memory = {variant: peak(step) for variant, step in steps.items()}
    return {"seconds": seconds, "peak_mib": memory, "losses": values}


def describe(results: dict[str, Any], scale: int) -> str:
    rows = []
    for name, found in results.items():
        full, strips = (found["seconds"][variant] for variant in VARIANTS)
        ratios = [a / b for a, b in zip(strips, full, strict=True)]
        before, after = (found["peak_mib"][variant] for variant in VARIANTS)
        rows.append(
            [
                name,
                "x".join(str(side // scale) for side in CASES[name][1]),
                f"{median(full):.2f}",
                f"{median(strips):.2f}",
                f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                f"{before:.0f}",
                f"{after:.0f}",
                f"{after / before:.2f}",
            ]
        )
    header = ["network", "crop", "s, full resolution", "s, strips", "ratio"]
    return table([*header, "peak MiB, full resolution", "peak MiB, strips", "ratio"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="number of measurements of each step")
    parser.add_argument("--compiled", action="store_true", help="compile the step as one graph")
    parser.add_argument("--networks", nargs="*", default=list(CASES), help="networks to train")
    parser.add_argument("--scale", type=int, default=1, help="divide the sides of the recipes' crops by this")
    parser.add_argument("--threads", type=int, default=2, help="number of torch threads")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="clock; cpu measures the process's CPU time"
    )
    parser.add_argument("--out", type=Path, help="write Markdown to this file, and JSON next to it")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    info = environment_info() | {"n (rounds)": args.rounds, "batch size": BATCH_SIZE}
    info |= {
        "clock": args.clock,
        "step": "one graph" if args.compiled else "eager",
        "crop divisor": args.scale,
    }
    results: dict[str, Any] = {}
    for name in args.networks:
        results[name] = measure(name, args.compiled, args.rounds, args.scale, CLOCKS[args.clock])
        print(describe({name: results[name]}, args.scale), flush=True)
        text = describe(results, args.scale)
        text += (
            "\n\nTimes are medians; ratios are medians (minimum to maximum) of the ratios within each round."
        )
        if args.out:  # after each network, because the last networks take minutes
            write_result(args.out, "Segmentation losses in strips", info, text, {"results": results})


if __name__ == "__main__":
    sys.exit(main())
