"""Inputs and outputs of predictions, in seconds, bytes and FLOPs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slipstream.errors import ConfigError

__all__ = ["Block", "Cluster", "Gamma", "Kind", "Link", "Model", "Prediction", "Strategy"]

Kind = Literal["ddp", "hsdp", "fsdp2"]


@dataclass(frozen=True)
class Block:
    """A part of a network whose computation and communication are modeled as a whole."""

    name: str
    parameters: int
    flops: float
    """FLOPs of the forward pass for one sample. A multiply-add counts as 2."""
    activations: float
    """Number of elements per sample that are saved for the backward pass."""
    norm_channels: int = 0
    """Number of channels whose statistics SyncBN reduces, or 0 if the block has no BatchNorm layer."""


@dataclass(frozen=True)
class Model:
    """A network and its blocks in execution order."""

    name: str
    blocks: tuple[Block, ...]

    @property
    def parameters(self) -> int:
        """Number of trainable parameters."""
        return sum(block.parameters for block in self.blocks)

    @property
    def flops(self) -> float:
        """FLOPs of the forward pass for one sample."""
        return sum(block.flops for block in self.blocks)

    @property
    def activations(self) -> float:
        """Number of elements per sample that are saved for the backward pass."""
        return sum(block.activations for block in self.blocks)


@dataclass(frozen=True)
class Link:
    """A communication link: transferring n bytes takes `alpha + n * beta` seconds (Hockney 1994)."""

    alpha: float
    beta: float
    quick_alpha: float | None = None
    """Alpha of a second protocol for small messages (NCCL's LL) with twice the beta; None if there is none."""

    def quick(self) -> Link:
        """Return a link that uses the second protocol, or this link if there is none."""
        return self if self.quick_alpha is None else Link(self.quick_alpha, 2 * self.beta)


@dataclass(frozen=True)
class Gamma:
    """Seconds of local work per byte of a collective's buffer: sums, and copies into and out of the buffer."""

    all_reduce: float = 0.0
    all_gather: float = 0.0
    reduce_scatter: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """A homogeneous cluster of nodes with GPUs. On a CPU cluster, each process counts as a GPU.

    Raises:
        ConfigError: if the number of GPUs or of GPUs per node is below 1, or if the GPUs do not fit in one node and
            their number is not a multiple of the number of GPUs per node.
    """

    gpus: int
    gpus_per_node: int
    intra: Link
    """Link between the GPUs of a node. Beta is per GPU per direction."""
    inter: Link
    """Link between nodes. Beta is for all network cards of a node combined, per direction."""
    flops: float
    """Sustained FLOP/s of one GPU."""
    memory_bandwidth: float
    """Sustained memory bandwidth of one GPU, in bytes per second."""
    memory: float
    """Memory of one GPU in bytes."""
    launch: float = 0.0
    """Seconds to launch a collective."""
    gamma: Gamma = Gamma()
    overlap: float = 1.0
    """Fraction of a collective that overlaps with computation: 1 on GPUs, 0 if the same cores compute and copy."""

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.gpus_per_node < 1:
            raise ConfigError(
                f"the number of GPUs ({self.gpus}) and the number of GPUs per node ({self.gpus_per_node}) must both "
                "be at least 1"
            )
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise ConfigError(
                f"the number of GPUs ({self.gpus}) is not a multiple of the number of GPUs per node "
                f"({self.gpus_per_node}); use at most {self.gpus_per_node} GPUs or a multiple of {self.gpus_per_node}"
            )

    @property
    def local(self) -> int:
        """Number of GPUs used per node."""
        return min(self.gpus, self.gpus_per_node)

    @property
    def machines(self) -> int:
        """Number of nodes used."""
        return self.gpus // self.local


@dataclass(frozen=True)
class Strategy:
    """A parallel strategy and the sizes of its data types."""

    kind: Kind
    sync_bn: bool = True
    parameter_bytes: int = 2
    """Bytes per parameter in the all-gathers of FSDP2 and HSDP, and in the forward pass."""
    gradient_bytes: int = 4
    """Bytes per gradient element in reductions."""
    activation_bytes: int = 2
    state_bytes: int = 8
    """Bytes of optimizer state per parameter. Adam stores two float32 values."""
    bucket_bytes: int = 25 * 2**20
    """DDP's `bucket_cap_mb`, in bytes."""
    unit_parameters: int = 2**18
    """FSDP2 and HSDP gather consecutive blocks in units of at least this many parameters. The default matches
    `MMFullyShardedDataParallel`."""
    noise: float = 0.02
    """Standard deviation of one GPU's compute time across steps, relative to its mean."""


@dataclass(frozen=True)
class Prediction:
    """Predicted time and memory of a training step, per GPU, in seconds and bytes."""

    strategy: Strategy
    cluster: Cluster
    batch: int
    """Samples per GPU per step."""
    compute: float
    """Time of the forward pass, the backward pass and the optimizer step, excluding communication."""
    exposed: float
    """Communication time that does not overlap with computation."""
    waiting: float
    """Time spent waiting for the slowest GPU."""
    sent: float
    """Bytes sent by each GPU."""
    memory: float

    @property
    def step_time(self) -> float:
        """Seconds per step."""
        return self.compute + self.exposed + self.waiting

    @property
    def samples_per_second(self) -> float:
        """Combined throughput of all GPUs, in samples per second."""
        return self.batch * self.cluster.gpus / self.step_time

    @property
    def efficiency(self) -> float:
        """Fraction of the step time that a GPU spends computing, from 0 to 1."""
        return self.compute / self.step_time

    @property
    def fits(self) -> bool:
        """Whether the step fits in GPU memory."""
        return self.memory <= self.cluster.memory
