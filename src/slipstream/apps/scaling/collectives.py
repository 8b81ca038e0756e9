"""Durations of collectives on nodes with several GPUs, in the alpha-beta cost model.

Each function models a collective of `n` bytes among `machines` x `local` GPUs. For reduce-scatter and all-gather,
`n` is the size of the whole buffer. Sources: Hockney 1994 (alpha + n beta); Thakur, Rabenseifner and Gropp 2005
(ring); Sanders, Speck and Träff 2009 (two trees); NVIDIA/nccl, src/graph/tuning.cc (a chain within a node, trees
between nodes, latencies by hop type).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from slipstream.apps.scaling.model_profile import Cluster, Link

__all__ = ["all_gather", "all_reduce", "hierarchical", "reduce_scatter", "ring", "tree", "volume"]

Links = tuple[Link, Link]
"""Links within a node and between nodes."""


def ring(n: float, links: Links, machines: int, local: int) -> float:
    """Return the duration in seconds of a reduce-scatter or an all-gather on a single ring.

    Each of the p - 1 hops transfers n / p bytes over all network cards of a node, so the duration is
    `latencies + (p - 1) / p * n * max(beta_intra, beta_inter)`.
    """
    p, (intra, inter) = machines * local, links
    latencies = (p - machines) * intra.alpha + (machines - 1) * inter.alpha
    return latencies + (p - 1) / p * n * _max_beta(links, machines, local)


def hierarchical(n: float, links: Links, machines: int, local: int) -> float:
    """Return the duration in seconds of a reduce-scatter or an all-gather that runs within nodes and between nodes.

    Between nodes, each of the `local` GPUs transfers n / local bytes. All GPUs of a node share its network cards.
    """
    return ring(n, links, 1, local) + ring(n, links, machines, 1)


def tree(n: float, links: Links, machines: int, local: int) -> float:
    """Return the duration in seconds of an all-reduce on two binary trees, with a transfer time of 2 n beta."""
    intra, inter = links
    latency = (local - 1) * intra.alpha + math.ceil(math.log2(machines)) * inter.alpha
    return 2 * (latency + n * _max_beta(links, machines, local))


def all_reduce(n: float, cluster: Cluster, machines: int, local: int) -> float:
    """Return the duration in seconds of an all-reduce with the fastest algorithm and protocol, or 0 for one GPU.

    On rings, an all-reduce is a reduce-scatter followed by an all-gather.
    """
    fastest = min(
        min(2 * _fastest_ring(n, links, machines, local), tree(n, links, machines, local))
        for links in _protocols(cluster)
    )
    return _with_launch(fastest + n * cluster.gamma.all_reduce, cluster, machines * local)


def all_gather(n: float, cluster: Cluster, machines: int, local: int) -> float:
    """Return the duration in seconds of an all-gather with the fastest algorithm and protocol, or 0 for one GPU."""
    fastest = min(_fastest_ring(n, links, machines, local) for links in _protocols(cluster))
    return _with_launch(fastest + n * cluster.gamma.all_gather, cluster, machines * local)


def reduce_scatter(n: float, cluster: Cluster, machines: int, local: int) -> float:
    """Return the duration in seconds of a reduce-scatter with the fastest algorithm and protocol, or 0 for one GPU."""
    fastest = min(_fastest_ring(n, links, machines, local) for links in _protocols(cluster))
    return _with_launch(fastest + n * cluster.gamma.reduce_scatter, cluster, machines * local)


def volume(n: float, gpus: int) -> float:
    """Return the number of bytes that each GPU sends in a reduce-scatter or an all-gather.

    In an all-reduce, each GPU sends twice as many bytes.
    """
    return (gpus - 1) / gpus * n


def _fastest_ring(n: float, links: Links, machines: int, local: int) -> float:
    return min(ring(n, links, machines, local), hierarchical(n, links, machines, local))


def _with_launch(seconds: float, cluster: Cluster, gpus: int) -> float:
    return cluster.launch + seconds if gpus > 1 else 0.0


def _protocols(cluster: Cluster) -> Iterator[Links]:
    yield cluster.intra, cluster.inter
    yield cluster.intra.quick(), cluster.inter.quick()


def _max_beta(links: Links, machines: int, local: int) -> float:
    intra, inter = links
    return max(intra.beta * (local > 1), inter.beta * (machines > 1))
