"""What a prediction starts from and what it gives: plain numbers in seconds, bytes and FLOPs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slipstream.errors import ConfigError

__all__ = ["Block", "Cluster", "Gamma", "Kind", "Link", "Model", "Prediction", "Strategy"]

Kind = Literal["ddp", "hsdp", "fsdp2"]


@dataclass(frozen=True)
class Block:
    """A part of a network that runs and is gathered as one."""

    name: str
    parameters: int
    flops: float
    """Of the forward pass of one sample; a multiplication and an addition are 2."""
    activations: float
    """Values of one sample that are kept for the backward pass."""
    norm_channels: int = 0
    """Channels whose statistics SyncBN shares; 0 if the block is no BatchNorm."""


@dataclass(frozen=True)
class Model:
    """A network, its blocks in the order in which they run."""

    name: str
    blocks: tuple[Block, ...]

    @property
    def parameters(self) -> int:
        """The number of trained values."""
        return sum(block.parameters for block in self.blocks)

    @property
    def flops(self) -> float:
        """FLOPs of the forward pass of one sample."""
        return sum(block.flops for block in self.blocks)

    @property
    def activations(self) -> float:
        """Values of one sample that are kept for the backward pass."""
        return sum(block.activations for block in self.blocks)


@dataclass(frozen=True)
class Link:
    """A way for messages: n bytes take `alpha + n * beta` seconds (Hockney 1994)."""

    alpha: float
    beta: float
    quick_alpha: float | None = None
    """Of a second protocol that has twice the beta, for small messages (NCCL's LL), if there is one."""

    def quick(self) -> Link:
        """Return the link under its second protocol."""
        return self if self.quick_alpha is None else Link(self.quick_alpha, 2 * self.beta)


@dataclass(frozen=True)
class Gamma:
    """Seconds of local work for each byte of a collective's buffer: sums, and copies into and out of it."""

    all_reduce: float = 0.0
    all_gather: float = 0.0
    reduce_scatter: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """Equal machines with equal GPUs (or processes, on CPUs).

    Raises:
        ConfigError: the GPUs do not fill the machines.
    """

    gpus: int
    gpus_per_node: int
    intra: Link
    """Between the GPUs of a machine; beta of one GPU's port, each direction."""
    inter: Link
    """Between machines; beta of all network cards of a machine together, each direction."""
    flops: float
    """That a GPU sustains, per second."""
    memory_bandwidth: float
    """Bytes per second."""
    memory: float
    """Bytes of one GPU."""
    launch: float = 0.0
    """Seconds to start any collective."""
    gamma: Gamma = Gamma()
    overlap: float = 1.0
    """The part of a collective that costs the computing processor nothing: 1 on GPUs; 0 where the cores
    that compute also copy."""

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.gpus_per_node < 1:
            raise ConfigError(f"{self.gpus} GPUs, {self.gpus_per_node} per machine: both must be at least 1")
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise ConfigError(
                f"{self.gpus} GPUs do not fill machines of {self.gpus_per_node}: give a multiple of it"
            )

    @property
    def local(self) -> int:
        """GPUs of a machine that take part."""
        return min(self.gpus, self.gpus_per_node)

    @property
    def machines(self) -> int:
        """Machines that take part."""
        return self.gpus // self.local


@dataclass(frozen=True)
class Strategy:
    """How the GPUs divide the work, and in which sizes of numbers."""

    kind: Kind
    sync_bn: bool = True
    parameter_bytes: int = 2
    """Of a parameter while it is gathered by FSDP2 and HSDP, or cast for the forward pass."""
    gradient_bytes: int = 4
    """Of a gradient while it is summed."""
    activation_bytes: int = 2
    state_bytes: int = 8
    """Of the optimizer's state for each parameter: Adam keeps two float32 values."""
    bucket_bytes: int = 25 * 2**20
    """DDP's `bucket_cap_mb`."""
    unit_parameters: int = 2**18
    """FSDP2 and HSDP gather consecutive blocks together until they are this many parameters;
    `MMFullyShardedDataParallel` by default takes no smaller ones."""
    noise: float = 0.02
    """Standard deviation of one GPU's computing time from step to step, relative to it."""


@dataclass(frozen=True)
class Prediction:
    """What a training step should take, per GPU; seconds and bytes."""

    strategy: Strategy
    cluster: Cluster
    batch: int
    """Samples of one GPU in one step."""
    compute: float
    """Forward, backward and optimizer, undisturbed."""
    exposed: float
    """Communication that nothing hides."""
    waiting: float
    """For the slowest of all GPUs."""
    sent: float
    """Bytes that each GPU sends."""
    memory: float

    @property
    def step_time(self) -> float:
        """Seconds from one step to the next."""
        return self.compute + self.exposed + self.waiting

    @property
    def samples_per_second(self) -> float:
        """Of all GPUs together."""
        return self.batch * self.cluster.gpus / self.step_time

    @property
    def efficiency(self) -> float:
        """The part of the step in which a GPU computes, 0 to 1."""
        return self.compute / self.step_time

    @property
    def fits(self) -> bool:
        """Whether a GPU's memory holds it."""
        return self.memory <= self.cluster.memory
