"""Inductor's options, a correction of its code, and an overlap of all-reduces."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from slipstream.speed.conv_layout import LayOutConvolutions

__all__ = ["OVERLAP_OPTIONS", "SendEarly", "correct_tiled_additions", "inductor_options"]

_MARK = "_slipstream_corrected"
# Torch reuses compiled code only if the options are equal, and two instances of a pass are not equal.
_LAYOUTS = LayOutConvolutions()


def inductor_options(device_type: str) -> dict[str, Any]:
    """Return inductor's options for code on this device type, in the format of `torch.compile(options=...)`.

    Measured CPU time of a step compiled as one graph, relative to an eager loop in channels_last
    (benchmarks/one_graph.py, one core of an AMD EPYC with AVX2, torch 2.13, batches of 4x3x64x64): PP-LiteSeg-T 1.18
    with inductor's default layouts, 0.86 with the model and the batch in channels_last, 0.66 with these options. Other
    networks with these options: STDC1 0.68, RegSeg 0.74, SegFormer-B0 0.81, DDRNet-23-slim 0.62.
    """
    if device_type != "cpu":
        # Inductor before torch 2.13 fails with an AssertionError if it tries to reorder the loops of foreach operations
        # that it has fused (pytorch/pytorch#176591).
        return {} if torch.__version__ >= "2.13" else {"loop_ordering_after_fusion": False}
    correct_tiled_additions()
    return {
        # Inductor's layout optimization covers only the forward pass. It computes convolutions in channels_last, but
        # passes operands with eager strides to `convolution_backward`, which causes extra copies and transposes.
        # LayOutConvolutions assigns strides instead, and inductor uses them if this option is off.
        "layout_optimization": False,
        "post_grad_custom_pre_pass": _LAYOUTS,
    }


def correct_tiled_additions() -> None:
    """Correct the index of atomic additions in loops that inductor tiles in two dimensions.

    Inductor generates atomic additions for code in several threads, for example for the gradient of `unfold`.
    `CppTile2DKernel.store` adds the variable of the inner loop to the index, and `CppVecKernel.store` adds it again
    through `ops.index_expr`. The gradients are then wrong, and the code writes beyond the end of the buffer. The
    correction passes the index without the variable. It applies to all code that this process compiles from now on,
    and only if the source code of these methods has this defect, as in torch 2.13.
    """
    from torch._inductor import config
    from torch._inductor.codegen.cpp import CppTile2DKernel, CppTile2DOverrides, CppVecKernel

    original = CppTile2DKernel.store
    if hasattr(original, _MARK):
        return
    adds_variable = (
        "transform_indexing" in inspect.getsource(method)
        for method in (original, CppTile2DOverrides.index_expr)
    )
    if not all(adds_variable) or "ops.index_expr" not in inspect.getsource(CppVecKernel.store):
        return

    def store(self: Any, name: str, index: Any, value: Any, mode: str | None = None) -> None:
        is_atomic = mode == "atomic_add" and (config.cpp.dynamic_threads or self.num_threads != 1)
        if is_atomic and not self.need_vec_transpose(self.rename_indexing(index)):
            CppVecKernel.store(self, name, index, value, mode)
        else:
            original(self, name, index, value, mode)

    setattr(store, _MARK, True)
    CppTile2DKernel.store = store  # type: ignore[method-assign]


class SendEarly(CustomGraphPass):
    """Moves each all-reduce to the point at which its bucket is full, and each wait to the first use of the result.

    Without this pass, all of these operators run after the whole backward pass. The order is the same on all ranks,
    because they compile the same graph.
    """

    def __call__(self, graph: fx.Graph) -> None:
        """Reorder the graph."""
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

    def uuid(self) -> Any:
        """Return an identifier of this version of the pass, which inductor requires to cache compiled code."""
        return "slipstream.send_early.1"


# Inductor options for a step that averages gradients across processes.
OVERLAP_OPTIONS = {
    # If enabled, the `reorder` options move the weight gradients, and therefore the buckets, to the end of the step.
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
    "post_grad_custom_post_pass": SendEarly(),
}
