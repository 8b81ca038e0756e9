"""A pass over inductor's graph that lays out each convolution and its gradients as a CPU computes them fastest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.experimental.symbolic_shapes import has_free_symbols

__all__ = ["LayOutConvolutions", "lay_out_convolutions"]

_ATEN = torch.ops.aten
_FORWARD, _BACKWARD = _ATEN.convolution.default, _ATEN.convolution_backward.default
_VIEW, _RESHAPE = _ATEN.view.default, _ATEN.reshape.default
_LAST = torch.channels_last
_HEAVY = 8
"""A weight with more than this many times the elements of input and output stays in the contiguous layout."""


class LayOutConvolutions(CustomGraphPass):
    """`lay_out_convolutions`, with a name under which inductor can cache compiled code."""

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite the graph."""
        lay_out_convolutions(graph)

    def uuid(self) -> Any:
        """Return what tells this version of the pass from others."""
        return "slipstream.lay_out_convolutions.1"


def lay_out_convolutions(graph: fx.Graph) -> None:
    """Rewrite convolutions, and let the strides of all other nodes follow.

    A 1x1 convolution becomes a matrix product over pixels. Any other takes its operands in channels_last, unless its
    weight is much larger than its activations. Inductor takes a convolution's operands with the strides in
    `node.meta["val"]` if its option `layout_optimization` is off; the strides are computed here anew from the first
    node to the last, so that what lies between two convolutions (BatchNorm, ReLU) takes their layout and nothing is
    transposed.
    """
    if not any(node.target is _FORWARD and node.meta["val"].ndim == 4 for node in graph.nodes):
        return
    laid_out: dict[tuple[fx.Node, torch.memory_format], fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in (_FORWARD, _BACKWARD):
            _lay_out(graph, node, laid_out)
        elif isinstance(node.target, torch._ops.OpOverload):
            _refresh(node)


def _lay_out(graph: fx.Graph, node: fx.Node, laid_out: dict[tuple[fx.Node, torch.memory_format], fx.Node]) -> None:
    backward = node.target is _BACKWARD
    first = 1 if backward else 0
    inputs, weight = node.args[first], node.args[first + 1]
    assert isinstance(inputs, fx.Node)
    assert isinstance(weight, fx.Node)
    stride, padding, dilation, transposed, _, groups = node.args[first + 3 : first + 9]
    x, w = inputs.meta["val"], weight.meta["val"]
    if x.ndim != 4 or transposed:
        _refresh(node)
        return
    out = node.args[0].meta["val"] if backward else node.meta["val"]  # type: ignore[union-attr]
    fixed = not (has_free_symbols(x) or has_free_symbols(out))
    pixelwise = tuple(w.shape[2:]) == (1, 1) and groups == 1 and set(stride) == {1} and set(padding) == {0}  # type: ignore[arg-type]
    last = pixelwise or not (fixed and w.numel() > _HEAVY * (x.numel() + out.numel()))
    wanted = _LAST if last else torch.contiguous_format
    with graph.inserting_before(node):
        for index in range(first + 2):
            arg = node.args[index]
            assert isinstance(arg, fx.Node)
            if pixelwise and fixed and arg is weight:
                continue
            node.update_arg(index, _in_layout(graph, arg, wanted, laid_out))
        if pixelwise and fixed:
            (_pixels_backward if backward else _pixels_forward)(graph, node)
            return
    _refresh(node)


def _in_layout(
    graph: fx.Graph,
    node: fx.Node,
    wanted: torch.memory_format,
    laid_out: dict[tuple[fx.Node, torch.memory_format], fx.Node],
) -> fx.Node:
    """Return `node`, or the one copy of it in the wanted layout."""
    value = node.meta["val"]
    if _is_laid_out(value, wanted):
        if node.op == "call_function" and node.target not in (_FORWARD, _BACKWARD):
            node.meta["inductor_realize_to_strides"] = True
        return node
    key = (node, wanted)
    if key not in laid_out:
        laid_out[key] = _call(graph, _ATEN.clone.default, node, memory_format=wanted)
        laid_out[key].meta["inductor_realize_to_strides"] = True
    return laid_out[key]


def _is_laid_out(value: Tensor, wanted: torch.memory_format) -> bool:
    """Compare strides also of dimensions of one element, which `is_contiguous` ignores and inductor does not."""
    return value.stride() == torch.empty_like(value, memory_format=wanted).stride()


def _call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    node = graph.call_function(target, args, kwargs)
    _refresh(node)
    return node


def _refresh(node: fx.Node) -> None:
    """Compute the strides of a node's result from those of its operands."""
    if node.target is _VIEW:  # of a tensor with other strides it may be a copy
        node.target = _RESHAPE
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    fakes = [a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
    if not fakes:
        return
    with fakes[0].fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


# ---- 1x1 convolutions as matrix products ----------------------------------------------------------------


def _rows(graph: fx.Graph, image: fx.Node) -> fx.Node:
    """Return a channels_last image as a matrix of pixels and channels."""
    last = _call(graph, _ATEN.permute.default, image, [0, 2, 3, 1])
    return _call(graph, _RESHAPE, last, [-1, image.meta["val"].shape[1]])


def _image(graph: fx.Graph, rows: fx.Node, like: Tensor) -> fx.Node:
    n, _, height, width = like.shape
    pixels = _call(graph, _RESHAPE, rows, [n, height, width, rows.meta["val"].shape[1]])
    return _call(graph, _ATEN.permute.default, pixels, [0, 3, 1, 2])


def _matrix(graph: fx.Graph, weight: fx.Node) -> fx.Node:
    return _call(graph, _RESHAPE, weight, list(weight.meta["val"].shape[:2]))


def _pixels_forward(graph: fx.Graph, node: fx.Node) -> None:
    image, weight, bias = node.args[:3]
    assert isinstance(image, fx.Node)
    assert isinstance(weight, fx.Node)
    transposed = _call(graph, _ATEN.permute.default, _matrix(graph, weight), [1, 0])
    rows = _call(graph, _ATEN.mm.default, _rows(graph, image), transposed)
    if bias is not None:
        rows = _call(graph, _ATEN.add.Tensor, rows, bias)
    node.replace_all_uses_with(_image(graph, rows, image.meta["val"]))
    graph.erase_node(node)


def _pixels_backward(graph: fx.Graph, node: fx.Node) -> None:
    grad, image, weight = node.args[:3]
    assert isinstance(grad, fx.Node)
    assert isinstance(image, fx.Node)
    assert isinstance(weight, fx.Node)
    rows = _rows(graph, grad)
    for user in list(node.users):
        index = user.args[1]
        if index == 0:
            product = _call(graph, _ATEN.mm.default, rows, _matrix(graph, weight))
            result = _image(graph, product, image.meta["val"])
        elif index == 1:
            transposed = _call(graph, _ATEN.permute.default, rows, [1, 0])
            product = _call(graph, _ATEN.mm.default, transposed, _rows(graph, image))
            result = _call(graph, _RESHAPE, product, list(weight.meta["val"].shape))
        else:
            result = _call(graph, _ATEN.sum.dim_IntList, rows, [0])
        user.replace_all_uses_with(result)
        graph.erase_node(user)
    graph.erase_node(node)
