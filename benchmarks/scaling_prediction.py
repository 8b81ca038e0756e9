"""Predict step times on many GPUs from a model of computation and communication (docs/scaling.md).

    python benchmarks/scaling_prediction.py pp_lite_t_seg --batch-per-gpu 8 --gpus 8,64,512,4096 --gpu h100

The model is a name in the registry of models. The prediction requires no GPU.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode

from report import table

SUSTAINED_FLOPS = 0.4  # fraction of the peak; below that of large language models (PaLM: 46%)
SUSTAINED_LINK = 0.8  # fraction of the nominal bandwidth of links and memory
LAUNCH = 8e-6  # seconds per collective: between NCCL's base latencies for a ring (LL 6.6 us, Simple 8.4 us)
FIRST_BUCKET_BYTES = 2**20  # size of DDP's first bucket, which is small so that the reduction starts early
SYNC_BN_MAX_ELEMENTS = 2**18  # above this, `SyncBatchNorm` runs two collectives instead of one
PROFILE_BATCH = 2  # after pooling to 1 x 1, BatchNorm rejects a batch of one sample


# ---- networks


@dataclass(frozen=True)
class Block:
    """A module with parameters of its own. FLOPs and saved activations are per sample, of the forward pass."""

    name: str
    parameters: int
    flops: float
    activations: float
    norm_channels: int = 0  # whose statistics SyncBN reduces


Blocks = Sequence[Block]


def total(blocks: Blocks, attribute: str) -> float:
    return sum(getattr(block, attribute) for block in blocks)


def describe(network: nn.Module, input_shape: tuple[int, ...]) -> list[Block]:
    """Run a copy of the network on the meta device and return its blocks.

    Operations without parameters count as part of the preceding block. FLOPs are those of matrix products and
    convolutions. Activations are the storages that autograd saves, in float32 elements.
    """
    copy = deepcopy(network).to("meta").train()
    counter = FlopCounterMode(display=False)
    costs: dict[str, list[float]] = {}  # parameters, FLOPs, saved bytes, channels
    current, counted, alive = "", 0.0, []
    seen = {tensor.untyped_storage()._cdata for tensor in (*copy.parameters(), *copy.buffers())}

    def enter(name: str, parameters: int, channels: int) -> None:
        nonlocal current, counted
        if current:
            costs[current][1] += counter.get_total_flops() - counted
            counted = counter.get_total_flops()
        current = name
        costs.setdefault(name, [parameters, 0.0, 0.0, channels])

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if current and storage._cdata not in seen:
            seen.add(storage._cdata)
            alive.append(tensor)
            costs[current][2] += storage.nbytes()
        return tensor

    owned: set[int] = set()
    for (module_name, module), copied in zip(network.named_modules(), copy.modules(), strict=True):
        new = [p for p in module.parameters(recurse=False) if p.requires_grad and id(p) not in owned]
        owned.update(map(id, new))
        if new:
            channels = module.num_features if isinstance(module, _BatchNorm) else 0
            entry = (module_name, sum(p.numel() for p in new), channels)
            copied.register_forward_pre_hook(lambda _module, _inputs, entry=entry: enter(*entry))
    with counter, torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        outputs = copy(torch.empty(PROFILE_BATCH, *input_shape, device="meta"))
        enter(current, 0, 0)
    del outputs
    return [
        Block(name, int(parameters), flops / PROFILE_BATCH, saved / 4 / PROFILE_BATCH, int(channels))
        for name, (parameters, flops, saved, channels) in costs.items()
    ]


# ---- hardware


@dataclass(frozen=True)
class Link:
    """Transferring n bytes takes `alpha + n * beta` seconds (Hockney 1994)."""

    alpha: float
    beta: float
    quick_alpha: float  # of a protocol for small messages (NCCL's LL), which has twice the beta


@dataclass(frozen=True)
class Cluster:
    """Nodes with equal GPUs, described by sustained rates.

    `gamma` is the time of local work (sums and copies) in each kind of collective, in seconds per byte. `overlap` is
    the fraction of a collective that the computation hides.
    """

    gpus: int
    gpus_per_node: int
    intra: Link
    inter: Link
    flops: float
    memory_bandwidth: float
    memory: float
    launch: float = 0.0
    gamma: Mapping[str, float] = field(default_factory=dict)
    overlap: float = 1.0

    @property
    def local(self) -> int:
        return min(self.gpus, self.gpus_per_node)

    @property
    def machines(self) -> int:
        return self.gpus // self.local


# Dense bf16 FLOP/s, memory bandwidth, memory, NVLink or PCI bandwidth per direction, alpha of large and small messages.
# Sources: NVIDIA's data sheets; latencies per hop from NCCL's src/graph/tuning.cc; TCP over Ethernet: 30 us (assumed).
GPUS = {
    "a100": (312e12, 2.039e12, 80e9, 300e9, 1.9e-6, 0.6e-6),
    "h100": (989e12, 3.35e12, 80e9, 450e9, 1.9e-6, 0.6e-6),
    "h200": (989e12, 4.8e12, 141e9, 450e9, 1.9e-6, 0.6e-6),
    "rtx4090": (165e12, 1.008e12, 24e9, 32e9, 2.5e-6, 1.0e-6),
}
# Bandwidth of one network card per direction, whether each GPU has its own card, alpha of large and small messages.
NETWORKS = {
    "ib400": (50e9, True, 4e-6, 2.7e-6),
    "eth100": (12.5e9, False, 30e-6, 30e-6),
}


def make_cluster(gpu: str, network: str, gpus: int, gpus_per_node: int = 8) -> Cluster:
    flops, memory_bandwidth, memory, bandwidth, alpha, quick = GPUS[gpu]
    card, per_gpu, card_alpha, card_quick = NETWORKS[network]
    cards = gpus_per_node if per_gpu else 1
    # FSDP2 copies values out of and into the buffers of its collectives.
    copy = 2 / (SUSTAINED_LINK * memory_bandwidth)
    intra = Link(alpha, 1 / (SUSTAINED_LINK * bandwidth), quick)
    inter = Link(card_alpha, 1 / (SUSTAINED_LINK * card * cards), card_quick)
    rates = (SUSTAINED_FLOPS * flops, SUSTAINED_LINK * memory_bandwidth)
    gamma = {"all_gather": copy, "reduce_scatter": copy}
    return Cluster(gpus, gpus_per_node, intra, inter, *rates, memory, LAUNCH, gamma)


# ---- collectives of n bytes (Thakur, Rabenseifner and Gropp 2005; Sanders, Speck and Träff 2009)


def collective(kind: str, n: float, cluster: Cluster, machines: int, local: int) -> float:
    """Seconds of an "all_reduce", "all_gather" or "reduce_scatter" with the fastest algorithm and protocol."""
    p, times, intra, inter = machines * local, [], cluster.intra, cluster.inter
    if p == 1:
        return 0.0
    for near, far, factor in ((intra.alpha, inter.alpha, 1), (intra.quick_alpha, inter.quick_alpha, 2)):
        near_beta, far_beta = factor * intra.beta * (local > 1), factor * inter.beta * (machines > 1)
        beta = max(near_beta, far_beta)
        one_ring = (p - machines) * near + (machines - 1) * far + (p - 1) / p * n * beta
        by_level = (local - 1) * (near + n / local * near_beta) + (machines - 1) * (
            far + n / machines * far_beta
        )
        two_trees = 2 * ((local - 1) * near + math.ceil(math.log2(machines)) * far + n * beta)
        ring = min(one_ring, by_level)
        times.append(min(2 * ring, two_trees) if kind == "all_reduce" else ring)
    return cluster.launch + min(times) + n * cluster.gamma.get(kind, 0.0)


# ---- one step

KINDS = ("ddp", "hsdp", "fsdp2")


@dataclass(frozen=True)
class Strategy:
    """A parallel strategy and the bytes of its data types. Adam stores 8 bytes of state per parameter."""

    kind: str
    sync_bn: bool = True
    parameter_bytes: int = 2
    gradient_bytes: int = 4
    activation_bytes: int = 2
    state_bytes: int = 8
    bucket_bytes: int = 25 * 2**20
    unit_parameters: int = 2**18  # at least, in the consecutive blocks that FSDP2 and HSDP gather together
    noise: float = 0.02  # standard deviation of the step time among GPUs, relative to the compute time


@dataclass
class Timeline:
    """A processor, and a network that runs one collective at a time in the order of their calls."""

    cluster: Cluster
    now: float = 0.0
    network: float = 0.0

    def send(self, kind: str, n: float, machines: int, local: int) -> float:
        """Queue a collective whose data is ready now, and return its end."""
        seconds = collective(kind, n, self.cluster, machines, local)
        self.network = max(self.now, self.network) + seconds
        self.now += (1 - self.cluster.overlap) * seconds
        return self.network

    def run(self, block: Block, seconds: float, strategy: Strategy) -> None:
        """Run one pass of a block after its SyncBN all-reduces: one of a row per GPU, or two smaller ones."""
        c, cluster = block.norm_channels, self.cluster
        if strategy.sync_bn and c and cluster.gpus > 1:
            rows = cluster.gpus * (2 * c + 1)
            for values in (rows,) if rows <= SYNC_BN_MAX_ELEMENTS else (c + 1, c):
                end = self.send("all_reduce", 4 * values, cluster.machines, cluster.local)
                self.now = max(self.now, end)
        self.now += seconds


@dataclass(frozen=True)
class Prediction:
    """Seconds of one step (in total, of computation and of exposed communication), and bytes of memory per GPU."""

    step_time: float
    compute: float
    exposed: float
    memory: float


def predict(blocks: Blocks, cluster: Cluster, s: Strategy, batch: int, step_time: float = 0.0) -> Prediction:
    """Predict one step with `batch` samples per GPU.

    A block's forward pass takes as long as its FLOPs or its memory traffic (roofline model), its backward pass twice as
    long. The optimizer is memory-bound. A measured `step_time` of one GPU, in seconds, replaces the sum.
    """
    shards = {"ddp": 1, "hsdp": cluster.local, "fsdp2": cluster.gpus}[s.kind]
    forward = []
    for block in blocks:
        traffic = 2 * batch * block.activations * s.activation_bytes + block.parameters * s.parameter_bytes
        forward.append(max(batch * block.flops / cluster.flops, traffic / cluster.memory_bandwidth))
    optimizer = total(blocks, "parameters") * (12 + 2 * s.state_bytes) / cluster.memory_bandwidth
    factor = step_time / (3 * sum(forward) + optimizer) if step_time else 1.0
    forward, optimizer = [factor * seconds for seconds in forward], factor * optimizer / shards
    timeline, parts = Timeline(cluster), units(blocks, s.unit_parameters)
    if s.kind == "ddp":
        run_ddp(blocks, forward, s, timeline)
    else:
        run_fsdp(blocks, parts, forward, s, timeline)
    compute = 3 * sum(forward) + optimizer
    exposed = max(0.0, max(timeline.now, timeline.network) + optimizer - compute)
    # Blom's approximation (1958) of the expected maximum of normally distributed times.
    slowest = NormalDist().inv_cdf((cluster.gpus - 0.375) / (cluster.gpus + 0.25))
    memory = memory_per_gpu(blocks, parts, s, batch, shards)
    return Prediction(compute * (1 + s.noise * slowest) + exposed, compute, exposed, memory)


def units(blocks: Blocks, min_parameters: int) -> list[range]:
    """Ranges of consecutive blocks with at least `min_parameters` parameters each, except for the last one."""
    ranges, start, size = [], 0, 0
    for index, block in enumerate(blocks):
        size += block.parameters
        if size >= min_parameters or index == len(blocks) - 1:
            ranges.append(range(start, index + 1))
            start, size = index + 1, 0
    return ranges


def run_ddp(blocks: Blocks, forward: list[float], s: Strategy, timeline: Timeline) -> None:
    """All-reduce each bucket of gradients during the backward pass (Li et al. 2020)."""
    for block, seconds in zip(blocks, forward, strict=True):
        timeline.run(block, seconds, s)
    bucket, limit = 0, FIRST_BUCKET_BYTES
    for index in reversed(range(len(blocks))):
        timeline.run(blocks[index], 2 * forward[index], s)
        bucket += blocks[index].parameters * s.gradient_bytes
        if bucket >= min(limit, s.bucket_bytes) or index == 0:
            timeline.send("all_reduce", bucket, timeline.cluster.machines, timeline.cluster.local)
            bucket, limit = 0, s.bucket_bytes


def run_fsdp(
    blocks: Blocks, parts: list[range], forward: list[float], s: Strategy, timeline: Timeline
) -> None:
    """Gather each unit while the previous one runs, and reduce-scatter its gradients (Zhao et al. 2023)."""
    cluster = timeline.cluster
    group = (1 if s.kind == "hsdp" else cluster.machines, cluster.local)
    sizes = [total(blocks[unit.start : unit.stop], "parameters") for unit in parts]
    for backward in (False, True):
        order = range(len(parts))[:: -1 if backward else 1]
        gathered = timeline.send("all_gather", sizes[order[0]] * s.parameter_bytes, *group)
        for position, unit in enumerate(order):
            timeline.now = max(timeline.now, gathered)
            if position + 1 < len(order):
                n = sizes[order[position + 1]] * s.parameter_bytes
                gathered = timeline.send("all_gather", n, *group)
            for index in reversed(parts[unit]) if backward else parts[unit]:
                timeline.run(blocks[index], (1 + backward) * forward[index], s)
            n = sizes[unit] * s.gradient_bytes
            if backward:
                timeline.send("reduce_scatter", n, *group)
            # The GPUs of a node reduce their shards at the same time, n bytes in total.
            if backward and s.kind == "hsdp":
                timeline.send("all_reduce", n, cluster.machines, 1)


def memory_per_gpu(blocks: Blocks, parts: list[range], s: Strategy, batch: int, shards: int) -> float:
    """Bytes of weights, gradients, state and activations (Rajbhandari et al. 2020).

    Sharded strategies also store the two largest units unsharded. DDP stores a copy of the weights in lower precision.
    """
    parameters = total(blocks, "parameters")
    memory = batch * total(blocks, "activations") * s.activation_bytes
    memory += parameters * (8 + s.state_bytes) / shards
    if s.kind == "ddp":
        return memory + parameters * (s.parameter_bytes if s.parameter_bytes < 4 else 0)
    sizes = sorted(total(blocks[unit.start : unit.stop], "parameters") for unit in parts)
    return memory + sum(sizes[-2:]) * (s.parameter_bytes + s.gradient_bytes)


# ---- command line


def row(blocks: Blocks, gpus: int, args: argparse.Namespace) -> list[Any]:
    cluster = make_cluster(args.gpu, args.network, gpus)
    predictions = {
        kind: predict(
            blocks, cluster, Strategy(kind, not args.no_sync_bn), args.batch_per_gpu, args.step_time
        )
        for kind in KINDS
    }
    cells = [f"{p.step_time * 1e3:.1f} ({p.memory / 1e9:.1f} GB)" for p in predictions.values()]
    fitting = [kind for kind in KINDS if predictions[kind].memory <= cluster.memory]
    if not fitting:
        return [gpus, *cells, "none fits", "-", "-", "-"]
    best = min(fitting, key=lambda kind: predictions[kind].step_time)
    p = predictions[best]
    samples = f"{gpus * args.batch_per_gpu / p.step_time:,.0f}"
    return [gpus, *cells, best, samples, f"{p.compute / p.step_time:.0%}", f"{p.exposed * 1e3:.1f}"]


def main() -> None:
    from slipstream.registry import MODELS

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--gpus", default="8,64,512,4096", help="numbers of GPUs, separated by commas")
    parser.add_argument("--gpu", choices=GPUS, default="h100")
    parser.add_argument("--network", choices=NETWORKS, default="ib400")
    parser.add_argument("--batch-per-gpu", type=int, default=8)
    parser.add_argument("--size", default="768x768", help="height and width of the images")
    parser.add_argument("--step-time", type=float, default=0.0, help="measured seconds per step on one GPU")
    parser.add_argument("--no-sync-bn", action="store_true")
    args = parser.parse_args()
    with torch.device("meta"):
        network = MODELS.build({"type": args.model})
    blocks = describe(network, (3, *map(int, args.size.split("x"))))
    print(f"{total(blocks, 'parameters'):,} parameters, {total(blocks, 'flops') / 1e9:,.1f} GFLOP forward\n")
    header = ["GPUs", "DDP ms", "HSDP ms", "FSDP2 ms", "best", "samples/s", "efficiency", "exposed ms"]
    print(table(header, [row(blocks, int(gpus), args) for gpus in args.gpus.split(",")]))


if __name__ == "__main__":
    main()
