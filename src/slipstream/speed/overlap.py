"""An inductor graph pass that overlaps gradient all-reduces with the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

__all__ = ["OVERLAP_OPTIONS", "SendEarly", "send_early"]


class SendEarly(CustomGraphPass):
    """`send_early` as a pass with a uuid, which inductor requires to cache compiled code."""

    def __call__(self, graph: fx.Graph) -> None:
        """Reorder the graph."""
        send_early(graph)

    def uuid(self) -> Any:
        """Return an identifier of this version of the pass."""
        return "slipstream.send_early.1"


def send_early(graph: fx.Graph) -> None:
    """Move each all-reduce to the point at which its bucket is full, and each wait to the first use of the result.

    Without this pass, all of these operators run after the whole backward pass. The order is the same on all ranks,
    because they compile the same graph.
    """
    nodes = list(graph.nodes)
    aten, comm = torch.ops.aten, torch.ops._c10d_functional
    packing = {
        aten.view.default, aten.reshape.default, aten.permute.default, aten.cat.default, aten.div.Tensor,
        aten.mul.Tensor, torch.ops.prims.convert_element_type.default,
    }  # fmt: skip
    early = {node for node in nodes if node.target is comm.all_reduce.default}
    for node in reversed(nodes):  # also move the operators that only pack a bucket
        if node.target in packing and early.issuperset(node.users):
            early.add(node)
    order = {node: (i, 0) for i, node in enumerate(nodes)}
    # Maps a node's index to the last node that was moved after it, and to the number of nodes moved after it.
    last_moved: dict[int, tuple[fx.Node, int]] = {}
    for node in nodes:
        if node in early and node.all_input_nodes:
            last = max(node.all_input_nodes, key=order.__getitem__)
            index = order[last][0]
            anchor, count = last_moved.get(index, (nodes[index], 0))
            anchor.append(node)
            last_moved[index], order[node] = (node, count + 1), (index, count + 1)
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in nodes:
        if node.target is comm.wait_tensor.default and node.users:
            min(node.users, key=position.__getitem__).prepend(node)


OVERLAP_OPTIONS = {
    # If enabled, the `reorder` options move the weight gradients, and therefore the buckets, to the end of the step.
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
    "post_grad_custom_post_pass": SendEarly(),
}
"""Inductor options for a step that averages gradients across processes."""
