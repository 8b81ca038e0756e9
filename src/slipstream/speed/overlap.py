"""A pass over inductor's graph, so that gradients travel while backward still runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

__all__ = ["OVERLAP", "SendEarly", "send_early"]


class SendEarly(CustomGraphPass):
    """`send_early`, with a name by which compiled code can be kept."""

    def __call__(self, graph: fx.Graph) -> None:
        """Reorder the graph."""
        send_early(graph)

    def uuid(self) -> Any:
        """Return what tells this version of the pass from others."""
        return "slipstream.send_early.1"


def send_early(graph: fx.Graph) -> None:
    """Start every all-reduce where its bucket is full, and wait for it where its result is needed.

    Traced as they are written, all of them would come after the whole backward. The order stays the same on
    all ranks, as they compile the same graph.
    """
    nodes = list(graph.nodes)
    aten, comm = torch.ops.aten, torch.ops._c10d_functional
    packing = {
        aten.view.default, aten.reshape.default, aten.permute.default, aten.cat.default, aten.div.Tensor,
        aten.mul.Tensor, torch.ops.prims.convert_element_type.default,
    }  # fmt: skip
    early = {node for node in nodes if node.target is comm.all_reduce.default}
    for node in reversed(nodes):  # what only packs a bucket moves with it
        if node.target in packing and early.issuperset(node.users):
            early.add(node)
    place = {node: (i, 0) for i, node in enumerate(nodes)}
    behind: dict[int, tuple[fx.Node, int]] = {}  # what was moved behind a node last, and how many were
    for node in nodes:
        if node in early and node.all_input_nodes:
            last = max(node.all_input_nodes, key=place.__getitem__)
            rank = place[last][0]
            anchor, count = behind.get(rank, (nodes[rank], 0))
            anchor.append(node)
            behind[rank], place[node] = (node, count + 1), (rank, count + 1)
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in nodes:
        if node.target is comm.wait_tensor.default and node.users:
            min(node.users, key=position.__getitem__).prepend(node)


OVERLAP = {
    # Both would put the gradients of weights, and with them the buckets, at the end of the step.
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
    "post_grad_custom_post_pass": SendEarly(),
}
"""Inductor's options for a step that sums gradients over processes."""
