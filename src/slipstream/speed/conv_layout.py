"""An inductor graph pass that selects the fastest CPU memory layout for each convolution and its gradients."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx.experimental.symbolic_shapes import has_free_symbols
from torch.utils._pytree import tree_leaves

from slipstream.speed.memory_format import has_incorrect_gradient

__all__ = ["LayOutConvolutions"]

_ATEN = torch.ops.aten
_FORWARD, _BACKWARD = _ATEN.convolution.default, _ATEN.convolution_backward.default
_VIEW, _RESHAPE = _ATEN.view.default, _ATEN.reshape.default
_CHANNELS_LAST, _CONTIGUOUS = torch.channels_last, torch.contiguous_format
# Operators whose results depend on the strides of their operands.
_STRIDE_DEPENDENT = {
    _ATEN.as_strided.default, _ATEN.as_strided_scatter.default, _ATEN.resize.default, _ATEN.view.dtype,
    _ATEN.view_as_complex.default, _ATEN.view_as_real.default,
}  # fmt: skip
_GROUP_NORMS = {_ATEN.native_group_norm.default, _ATEN.native_group_norm_backward.default}
# A convolution uses the contiguous format if its ratio of weight to activation elements exceeds this number.
_MAX_WEIGHT_RATIO = 8


class LayOutConvolutions(CustomGraphPass):
    """Rewrites 2-d convolutions and their gradients in place, and recomputes the strides of all other nodes.

    A 1x1 convolution becomes a matrix product over the pixels. All other convolutions use channels_last, unless the
    weight is much larger than the activations. In that case, channels_last is slow: oneDNN writes the weight
    gradient in a different order, and torch then transposes it.

    With `layout_optimization` off, inductor passes operands to a convolution with the strides of `node.meta["val"]`.
    This pass recomputes these strides from the first node to the last, so BatchNorm and ReLU between convolutions use
    the layout of the convolutions. Operators that depend on strides, draw random numbers or are not part of torch
    receive operands with the strides of eager training.

    Graphs with dynamic shapes are not changed.
    """

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite the graph."""
        convolutions = [n for n in graph.nodes if n.target in (_FORWARD, _BACKWARD)]
        if any(has_free_symbols([a.meta["val"] for a in n.all_input_nodes]) for n in convolutions):
            return
        if any(_is_conv2d(node) for node in convolutions):
            _Layouts(graph).assign()

    def uuid(self) -> Any:
        """Return a hash of the files that change generated code, so that a change invalidates cached code."""
        return get_hash_for_files((__file__, str(Path(__file__).with_name("inductor.py"))))


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node, tuple[Any, ...]]:
    """Return the input, the weight and `(bias, stride, padding, dilation, transposed, output_padding, groups)`."""
    image, weight, *others = node.args[1 if node.target is _BACKWARD else 0 :]
    return cast(fx.Node, image), cast(fx.Node, weight), tuple(others[:7])


def _is_conv2d(node: fx.Node) -> bool:
    image, _, (_, _, _, _, transposed, *_) = _operands(node)
    return image.meta["val"].ndim == 4 and not transposed


def _is_incorrect(node: fx.Node) -> bool:
    """Return whether torch's kernel is incorrect in channels_last; see `memory_format.check_cpu_kernels`."""
    if node.target not in (_FORWARD, _BACKWARD):
        return node.target in _GROUP_NORMS
    _, weight, (_, stride, *_) = _operands(node)
    return has_incorrect_gradient(weight.meta["val"]) and max(stride) > 1


class _Layouts:
    """Assigns layouts to the nodes of one graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.eager = {n: n.meta["val"].stride() for n in graph.nodes if isinstance(n.meta.get("val"), Tensor)}
        self.copies: dict[tuple[fx.Node, torch.memory_format], fx.Node] = {}

    def assign(self) -> None:
        """Visit all nodes in order."""
        for node in list(self.graph.nodes):
            if node.op != "call_function":
                continue
            with self.graph.inserting_before(node):
                if _is_incorrect(node) or _needs_eager_strides(node):
                    self._restore(node)  # if the operands have eager strides, the result also has them
                elif node.target in (_FORWARD, _BACKWARD) and _is_conv2d(node):
                    self._convolution(node)
                else:
                    _update_strides(node)

    def _convolution(self, node: fx.Node) -> None:
        image, weight, (_, stride, padding, _, _, _, groups) = _operands(node)
        shape = weight.meta["val"].shape
        out = cast(fx.Node, node.args[0] if node.target is _BACKWARD else node)
        activations = image.meta["val"].numel() + out.meta["val"].numel()
        if tuple(shape[2:]) == (1, 1) and groups == 1 and set(stride) == {1} and set(padding) == {0}:
            node.replace_input_with(image, self._copied(image, _CHANNELS_LAST))
            if node.target is _BACKWARD:
                node.replace_input_with(out, self._copied(out, _CHANNELS_LAST))
                self._pixels_backward(node)
            else:
                self._pixels_forward(node)
            return
        memory_format = _CONTIGUOUS if shape.numel() > _MAX_WEIGHT_RATIO * activations else _CHANNELS_LAST
        for operand in {image, weight, *([out] if node.target is _BACKWARD else [])}:
            node.replace_input_with(operand, self._copied(operand, memory_format))
        _update_strides(node)

    def _copied(self, node: fx.Node, memory_format: torch.memory_format) -> fx.Node:
        """Return `node` if its result has the layout of `memory_format`, otherwise a cached copy with that layout."""
        value = node.meta["val"]
        # `is_contiguous` ignores the strides of dimensions of size one; inductor does not.
        if value.stride() == torch.empty_like(value, memory_format=memory_format).stride():
            node.meta["inductor_realize_to_strides"] = True  # materialize the value once, in this layout
            return node
        key = (node, memory_format)
        if key not in self.copies:
            self.copies[key] = self._call(_ATEN.clone.default, node, memory_format=memory_format)
            self.copies[key].meta["inductor_realize_to_strides"] = True
        return self.copies[key]

    def _restore(self, node: fx.Node) -> None:
        for operand in node.all_input_nodes:
            strides = self.eager.get(operand)
            if strides is not None and operand.meta["val"].stride() != strides:
                forced = self._call(torch.ops.prims.inductor_force_stride_order.default, operand, strides)
                node.replace_input_with(operand, forced)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        _update_strides(node)
        return node

    # ---- 1x1 convolutions as matrix products -----------------------------------------------------------

    def _rows(self, image: fx.Node) -> fx.Node:
        """Return a channels_last image as a matrix with a row for each pixel and a column for each channel."""
        last = self._call(_ATEN.permute.default, image, [0, 2, 3, 1])
        return self._call(_RESHAPE, last, [-1, image.meta["val"].shape[1]])

    def _image(self, rows: fx.Node, like: Tensor) -> fx.Node:
        batch, _, height, width = like.shape
        pixels = self._call(_RESHAPE, rows, [batch, height, width, rows.meta["val"].shape[1]])
        return self._call(_ATEN.permute.default, pixels, [0, 3, 1, 2])

    def _matrix(self, weight: fx.Node) -> fx.Node:
        return self._call(_RESHAPE, weight, list(weight.meta["val"].shape[:2]))

    def _pixels_forward(self, node: fx.Node) -> None:
        image, weight, (bias, *_) = _operands(node)
        transposed = self._call(_ATEN.permute.default, self._matrix(weight), [1, 0])
        rows = self._call(_ATEN.mm.default, self._rows(image), transposed)
        if bias is not None:
            rows = self._call(_ATEN.add.Tensor, rows, bias)
        self._replace(node, self._image(rows, image.meta["val"]))

    def _pixels_backward(self, node: fx.Node) -> None:
        image, weight, _ = _operands(node)
        grad = self._rows(cast(fx.Node, node.args[0]))
        for user in list(node.users):
            if not user.users:  # an unused gradient, which may be None
                self.graph.erase_node(user)
                continue
            if user.args[1] == 0:
                product = self._call(_ATEN.mm.default, grad, self._matrix(weight))
                result = self._image(product, image.meta["val"])
            elif user.args[1] == 1:
                transposed = self._call(_ATEN.permute.default, grad, [1, 0])
                product = self._call(_ATEN.mm.default, transposed, self._rows(image))
                result = self._call(_RESHAPE, product, list(weight.meta["val"].shape))
            else:
                result = self._call(_ATEN.sum.dim_IntList, grad, [0])
            self._replace(user, result)
        self.graph.erase_node(node)

    def _replace(self, node: fx.Node, result: fx.Node) -> None:
        if node in self.eager:
            self.eager[result] = self.eager[node]
        node.replace_all_uses_with(result)
        self.graph.erase_node(node)


def _needs_eager_strides(node: fx.Node) -> bool:
    target = node.target
    # For `item` and masks, `_update_strides` would create a different symbol.
    if node.meta.get("unbacked_bindings"):
        return True
    if target is operator.getitem:
        return False
    if not isinstance(target, torch._ops.OpOverload) or any(
        "val" not in n.meta for n in node.all_input_nodes
    ):
        return True
    builtin = target.namespace in ("aten", "prims", "_c10d_functional")
    return not builtin or target in _STRIDE_DEPENDENT or torch.Tag.nondeterministic_seeded in target.tags


def _update_strides(node: fx.Node) -> None:
    """Recompute the fake tensor of a node's result, including its strides, from the operands."""
    if node.target is _VIEW:  # the new strides may not support a view
        node.target = _RESHAPE
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    if tensors and callable(node.target):  # factory functions keep their strides
        with cast(Any, tensors[0]).fake_mode:
            node.meta["val"] = node.target(*args, **kwargs)
