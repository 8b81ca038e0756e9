"""Discrete-event simulation of a training step on a processor and a network that runs one collective at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from slipstream.apps.scaling.collectives import all_gather, all_reduce, reduce_scatter, volume
from slipstream.apps.scaling.model_profile import Block, Cluster, Model, Strategy

__all__ = [
    "FIRST_BUCKET_BYTES",
    "SYNC_BN_MAX_ELEMENTS",
    "Event",
    "Schedule",
    "Work",
    "shards",
    "simulate",
    "units",
]

FIRST_BUCKET_BYTES = 2**20
"""Size of the first bucket in torch's DDP. It is small so that the reduction starts early."""
SYNC_BN_MAX_ELEMENTS = 2**18
"""Maximum number of elements for which `slipstream.model.SyncBatchNorm` runs one collective instead of two."""
_STATISTICS_BYTES = 4


@dataclass(frozen=True)
class Work:
    """Compute times in seconds: forward and backward passes of each block in execution order, and the optimizer."""

    forward: Sequence[float]
    backward: Sequence[float]
    optimizer: float

    @property
    def seconds(self) -> float:
        """Total compute time."""
        return sum(self.forward) + sum(self.backward) + self.optimizer


@dataclass(frozen=True)
class Event:
    """A collective and its time span."""

    name: str
    start: float
    end: float
    sent: float
    """Bytes sent by each GPU."""


@dataclass
class Schedule:
    """Timeline of one GPU during a step. All GPUs have the same timeline."""

    cluster: Cluster
    now: float = 0.0
    """Time until which the processor is busy."""
    network: float = 0.0
    """Time until which the network is busy."""
    events: list[Event] = field(default_factory=list)

    def compute(self, seconds: float) -> None:
        """Keep the processor busy for a number of seconds."""
        self.now += seconds

    def send(self, name: str, seconds: float, sent: float) -> float:
        """Queue a collective whose data is ready now, and return its end time."""
        start = max(self.now, self.network)
        self.network = start + seconds
        self.now += (1 - self.cluster.overlap) * seconds
        self.events.append(Event(name, start, self.network, sent))
        return self.network

    def wait(self, until: float) -> None:
        """Keep the processor idle until a given time."""
        self.now = max(self.now, until)


def simulate(model: Model, cluster: Cluster, strategy: Strategy, work: Work) -> Schedule:
    """Return the timeline of one step. Its `now` attribute is the end time of the step."""
    schedule = Schedule(cluster)
    run = _simulate_ddp if strategy.kind == "ddp" else _simulate_fsdp
    run(model, cluster, strategy, work, schedule)
    schedule.wait(schedule.network)
    schedule.compute(work.optimizer)
    return schedule


def units(blocks: Sequence[Block], min_parameters: int) -> list[range]:
    """Return ranges of consecutive blocks to gather together.

    Each range has at least `min_parameters` parameters. The last one may have fewer.
    """
    ranges, start, size = [], 0, 0
    for index, block in enumerate(blocks):
        size += block.parameters
        if size >= min_parameters or index == len(blocks) - 1:
            ranges.append(range(start, index + 1))
            start, size = index + 1, 0
    return ranges


def _simulate_ddp(model: Model, cluster: Cluster, strategy: Strategy, work: Work, schedule: Schedule) -> None:
    """Simulate DDP, which all-reduces each bucket of gradients during the backward pass (Li et al. 2020)."""
    group = (cluster, cluster.machines, cluster.local)
    for index, block in enumerate(model.blocks):
        _run_block(block, strategy, schedule, work.forward[index])
    bucket, limit = 0, FIRST_BUCKET_BYTES
    for index, block in _reversed_blocks(model.blocks):
        _run_block(block, strategy, schedule, work.backward[index])
        bucket += block.parameters * strategy.gradient_bytes
        if bucket >= min(limit, strategy.bucket_bytes) or (index == 0 and bucket):
            schedule.send("all-reduce", all_reduce(bucket, *group), 2 * volume(bucket, cluster.gpus))
            bucket, limit = 0, strategy.bucket_bytes


def _simulate_fsdp(
    model: Model, cluster: Cluster, strategy: Strategy, work: Work, schedule: Schedule
) -> None:
    """Simulate FSDP2 or HSDP (Zhao et al. 2023).

    Each unit is gathered while the previous unit runs. After a unit's backward pass, its gradients are
    reduce-scattered.
    """
    ranks = shards(cluster, strategy)
    group = (cluster, ranks // cluster.local, cluster.local)
    all_units = units(model.blocks, strategy.unit_parameters)
    sizes = [sum(model.blocks[index].parameters for index in unit) for unit in all_units]

    def gather(unit: int) -> float:
        n = sizes[unit] * strategy.parameter_bytes
        return schedule.send("all-gather", all_gather(n, *group), volume(n, ranks))

    gathered = gather(0)
    for unit_index, unit in enumerate(all_units):
        schedule.wait(gathered)
        if unit_index + 1 < len(all_units):
            gathered = gather(unit_index + 1)
        for index in unit:
            _run_block(model.blocks[index], strategy, schedule, work.forward[index])
    gathered = gather(len(all_units) - 1)
    for unit_index in reversed(range(len(all_units))):
        schedule.wait(gathered)
        if unit_index > 0:
            gathered = gather(unit_index - 1)
        for index in reversed(all_units[unit_index]):
            _run_block(model.blocks[index], strategy, schedule, work.backward[index])
        n = sizes[unit_index] * strategy.gradient_bytes
        schedule.send("reduce-scatter", reduce_scatter(n, *group), volume(n, ranks))
        if ranks < cluster.gpus:
            # All GPUs of a node reduce their partitions concurrently over shared network cards, n bytes in total.
            seconds = all_reduce(n, cluster, cluster.machines, 1)
            schedule.send("all-reduce", seconds, 2 * volume(n / ranks, cluster.machines))


def _run_block(block: Block, strategy: Strategy, schedule: Schedule, seconds: float) -> None:
    """Run one pass of a block. A SyncBN block first waits for one or two small all-reduces.

    A single all-reduce sends a buffer with one row per GPU. The row contains the moments and the sample count of that
    GPU. If the buffer is too large, the means and counts are reduced first, then the squared deviations. The backward
    pass reduces the gradients of these values in the same way.
    """
    cluster = schedule.cluster
    if strategy.sync_bn and block.norm_channels and cluster.gpus > 1:
        c = block.norm_channels
        rows = cluster.gpus * (2 * c + 1)
        for values in (rows,) if rows <= SYNC_BN_MAX_ELEMENTS else (c + 1, c):
            n = values * _STATISTICS_BYTES
            seconds_each = all_reduce(n, cluster, cluster.machines, cluster.local)
            schedule.wait(schedule.send("SyncBN", seconds_each, 2 * volume(n, cluster.gpus)))
    schedule.compute(seconds)


def shards(cluster: Cluster, strategy: Strategy) -> int:
    """Return the number of GPUs among which parameters, gradients and optimizer state are partitioned."""
    if strategy.kind == "ddp":
        return 1
    return cluster.local if strategy.kind == "hsdp" else cluster.gpus


def _reversed_blocks(blocks: Sequence[Block]) -> Iterator[tuple[int, Block]]:
    return reversed(list(enumerate(blocks)))
