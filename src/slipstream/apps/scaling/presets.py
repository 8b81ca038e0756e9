"""Presets for hardware, and the cost profile of a SegFormer with one billion parameters."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.apps.scaling.model_profile import Block, Cluster, Gamma, Link, Model

__all__ = [
    "GPUS",
    "NETWORKS",
    "SUSTAINED_FLOPS",
    "SUSTAINED_LINK",
    "Gpu",
    "Network",
    "make_cluster",
    "segformer_1b",
]

SUSTAINED_FLOPS = 0.4
"""Sustained fraction of peak FLOP/s. This fraction is below that of large language models (PaLM 46%, Chowdhery et al.
2022; MegaScale 55%, Jiang et al. 2024), because convolutions are less efficient."""
SUSTAINED_LINK = 0.8
"""Sustained fraction of the nominal bandwidth of links and memory, which accounts for protocol overhead and imperfect
access patterns."""


@dataclass(frozen=True)
class Gpu:
    """A GPU's specification from the vendor's data sheet."""

    flops: float
    """Dense bf16 (V100: fp16) FLOP/s with float32 accumulation."""
    memory_bandwidth: float
    memory: float
    link_bandwidth: float
    """Bandwidth to the other GPUs of the node, in bytes per second per direction."""
    link_alpha: tuple[float, float] = (1.9e-6, 0.6e-6)
    """Alpha for large and for small messages."""


@dataclass(frozen=True)
class Network:
    """The network between nodes."""

    bandwidth: float
    """Bandwidth of one network card, in bytes per second per direction."""
    per_gpu: bool
    """Whether each GPU has its own network card. If False, each node has a single card."""
    alpha: tuple[float, float]
    """Alpha for large and for small messages."""


# Sources: NVIDIA's data sheets "V100 Tensor Core GPU" (2020, SXM2 32GB), "A100" (2022, SXM 80GB), "H100" (2023, SXM),
# "H200" (2024, SXM), and the Ada whitepaper (RTX 4090). Their NVLink figures are the sum of both directions.
# Latencies per hop: NCCL's table (src/graph/tuning.cc) for rings with its LL128 and LL protocols: NVLink 1.9
# and 0.6 us, PCI 2.5 and 1.0 us, network 4.0 and 2.7 us. TCP over Ethernet: 30 us (assumed).
GPUS = {
    "v100": Gpu(125e12, 0.9e12, 32e9, 150e9),
    "a100": Gpu(312e12, 2.039e12, 80e9, 300e9),
    "h100": Gpu(989e12, 3.35e12, 80e9, 450e9),
    "h200": Gpu(989e12, 4.8e12, 141e9, 450e9),
    "rtx4090": Gpu(165e12, 1.008e12, 24e9, 32e9, (2.5e-6, 1.0e-6)),
}
NETWORKS = {
    "ib400": Network(50e9, True, (4e-6, 2.7e-6)),
    "ib200": Network(25e9, True, (4e-6, 2.7e-6)),
    "eth100": Network(12.5e9, False, (30e-6, 30e-6)),
    "eth25": Network(3.125e9, False, (30e-6, 30e-6)),
}
_LAUNCH = 8e-6  # between NCCL's base latencies for a ring: LL 6.6 us, Simple 8.4 us (src/graph/tuning.cc)


def make_cluster(gpu: Gpu, network: Network, gpus: int, gpus_per_node: int) -> Cluster:
    """Return a cluster of `gpus` GPUs, described by its sustained FLOP/s and bandwidths.

    Raises:
        ConfigError: if the numbers of GPUs are invalid; see `Cluster`.
    """
    cards = gpus_per_node if network.per_gpu else 1
    # FSDP2 copies values out of all-gather buffers and into reduce-scatter buffers.
    copy = 2 / (SUSTAINED_LINK * gpu.memory_bandwidth)
    return Cluster(
        gpus,
        gpus_per_node,
        intra=_link(gpu.link_alpha, gpu.link_bandwidth),
        inter=_link(network.alpha, network.bandwidth * cards),
        flops=SUSTAINED_FLOPS * gpu.flops,
        memory_bandwidth=SUSTAINED_LINK * gpu.memory_bandwidth,
        memory=gpu.memory,
        launch=_LAUNCH,
        gamma=Gamma(all_gather=copy, reduce_scatter=copy),
    )


def _link(alpha: tuple[float, float], bandwidth: float) -> Link:
    large, small = alpha
    return Link(large, 1 / (SUSTAINED_LINK * bandwidth), small)


def segformer_1b(height: int, width: int) -> Model:
    """Return the profile of a SegFormer (arXiv 2105.15203) with one billion parameters.

    The costs are computed from formulas, without building the network. Widths are four times those of B5 (256, 512,
    1280, 2048), and depths are 3, 6, 30 and 3. Attention downsamples keys and values by factors of 8, 4, 2 and 1
    per side. The feed-forward layers are four times as wide as the tokens and contain a 3x3 depthwise convolution.
    The all-MLP decoder has 768 channels and 19 classes. A block of width C with reduction R has
    `12 C^2 + 36 C + (R C)^2` weights (the last term only if R > 1), not counting biases and LayerNorms, and saves
    `20 C` elements per token.
    """
    stages = zip((256, 512, 1280, 2048), (3, 6, 30, 3), (8, 4, 2, 1), (4, 8, 16, 32), strict=True)
    blocks, in_channels, decoder, hidden, classes = [], 3, 0, 768, 19
    for number, (c, depth, reduction, stride) in enumerate(stages, 1):
        tokens = (height // stride) * (width // stride)
        patch = (7 if number == 1 else 3) ** 2 * in_channels * c
        blocks.append(Block(f"patch{number}", patch + 3 * c, 2.0 * patch * tokens, 3.0 * c * tokens))
        keys = tokens / reduction**2
        # The query, projection and feed-forward layers process all tokens. The key and value layers process only the
        # reduced tokens.
        per_token = 2 * c * c + 8 * c * c + 36 * c
        per_key = 2 * c * c + ((reduction * c) ** 2 if reduction > 1 else 0)
        vectors = 19 * c if reduction > 1 else 16 * c  # biases and LayerNorms
        flops = 2 * (per_token * tokens + per_key * keys) + 4 * tokens * keys * c
        block = (per_token + per_key + vectors, flops, 20.0 * c * tokens)
        blocks += [Block(f"block{number}.{index}", *block) for index in range(depth)]
        decoder += c * hidden
        in_channels = c
    pixels = (height // 4) * (width // 4)
    decoder += 4 * hidden * hidden + hidden * classes
    blocks.append(Block("decoder", decoder, 2.0 * decoder * pixels, 6.0 * hidden * pixels, hidden))
    return Model("segformer_1b", tuple(blocks))
