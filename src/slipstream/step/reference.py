"""Compute reference results for a captured step with eager kernels, in the precision of the step or in float64."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

from slipstream.sharding import is_sharded

__all__ = ["copies", "interpret"]

_LOWER_PRECISIONS = (torch.float32, torch.float16, torch.bfloat16)


def copies(inputs: Sequence[Any], dtype: torch.dtype | None = None) -> list[Any]:
    """Return the inputs of a graph with each tensor copied. Lower-precision tensors are converted to `dtype`, if set.

    The copies have the strides and `requires_grad` of the originals. Copies of tensors that share memory also share
    memory.
    """
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    memory: dict[int, tuple[Any, Tensor]] = {}
    for group in _group_by_storage(tensors).values():
        start = min(tensor.storage_offset() for tensor in group)
        end = max(tensor.storage_offset() + _extent(tensor) for tensor in group)
        flat = torch.as_strided(group[0].detach(), (end - start,), (1,), start)
        target_dtype = dtype if dtype is not None and flat.dtype in _LOWER_PRECISIONS else flat.dtype
        memory.update(dict.fromkeys(map(id, group), (start, flat.to(target_dtype, copy=True))))
    copied: dict[int, Tensor] = {}
    for tensor in tensors:
        if id(tensor) in memory:
            start, flat = memory[id(tensor)]
            new = flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset() - start).detach()
        else:
            new = tensor.detach().clone()
        copied[id(tensor)] = new.requires_grad_(tensor.requires_grad)
    return [copied[id(value)] if isinstance(value, Tensor) else value for value in inputs]


def _group_by_storage(tensors: Sequence[Tensor]) -> dict[Any, list[Tensor]]:
    """Return the strided tensors, grouped by storage and dtype."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.layout is torch.strided and not is_sharded(tensor):
            groups.setdefault((tensor.untyped_storage()._cdata, tensor.dtype), []).append(tensor)
    return groups


def _extent(tensor: Tensor) -> int:
    """Return the number of storage elements from the tensor's first to its last element, inclusive."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))


def interpret(graph: fx.GraphModule, inputs: Sequence[Any], double: bool = False) -> None:
    """Run a graph captured by Dynamo, operator by operator. Tensors in `inputs` are modified in place.

    Args:
        graph: the graph that `torch.compile` passes to a backend.
        inputs: the graph's inputs; if `double` is true, the result of `copies(..., torch.float64)`.
        double: whether to compute in float64 and without autocast. Random numbers are still drawn in lower
            precision, because drawing them in float64 would change their values.
    """
    with torch.enable_grad(), _InFloat64() if double else nullcontext():
        _Interpreter(graph, double).run(*inputs)


class _Interpreter(fx.Interpreter):
    """Runs a graph and ignores activation checkpointing, which does not affect the results."""

    def __init__(self, graph: fx.GraphModule, double: bool) -> None:
        super().__init__(graph)
        self.extra_traceback = False
        self._autocasts = not double

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.higher_order.tag_activation_checkpoint:
            return _Interpreter(args[0], not self._autocasts).run(*args[1:])
        if not self._autocasts and target is torch.amp.autocast_mode._enter_autocast:
            return None
        if not self._autocasts and target is torch.amp.autocast_mode._exit_autocast:
            return None
        return super().call_function(target, args, kwargs)


class _InFloat64(TorchDispatchMode):
    """Replaces lower precisions with float64 in all operators, except when they draw random numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            return _draw(func, args, kwargs)
        args, kwargs = tree_map(_float64_dtype, (args, kwargs))
        return tree_map_only(Tensor, _in_float64, func(*args, **kwargs))


def _draw(func: Any, args: Any, kwargs: Any) -> Any:
    """Draw random numbers in lower precision: convert float64 tensors to float32, and keep dtype arguments."""
    lower_args, lower_kwargs = tree_map_only(Tensor, _in_float32, (args, kwargs))
    out = func(*lower_args, **lower_kwargs)
    if func._schema.is_mutable and isinstance(args[0], Tensor):
        return args[0].copy_(out)
    return tree_map_only(Tensor, _in_float64, out)


def _float64_dtype(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _LOWER_PRECISIONS else value


def _in_float64(value: Tensor) -> Tensor:
    return value.to(torch.float64) if value.dtype in _LOWER_PRECISIONS else value


def _in_float32(value: Tensor) -> Tensor:
    return value.to(torch.float32) if value.dtype == torch.float64 else value
