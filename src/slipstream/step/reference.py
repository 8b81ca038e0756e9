"""Compute what a captured step should give: by torch's own kernels, and in float64."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

__all__ = ["copies", "interpret"]

_LOWER = (torch.float32, torch.float16, torch.bfloat16)


def copies(inputs: Sequence[Any], dtype: torch.dtype | None = None) -> list[Any]:
    """Return the inputs of a graph with copies of the tensors, of `dtype` where they are of a lower precision.

    Tensors that occur twice are one copy, and views of one tensor are copied apart; what requires grad does so again.
    """
    made: dict[int, Tensor] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in made:
            wanted = dtype if dtype is not None and value.dtype in _LOWER else value.dtype
            new = value.detach().to(wanted, copy=True, memory_format=torch.preserve_format)
            made[id(value)] = new.requires_grad_(value.requires_grad)
        return made[id(value)]

    return [copy(value) for value in inputs]


def interpret(graph: fx.GraphModule, inputs: Sequence[Any], double: bool = False) -> None:
    """Run a graph that Dynamo captured, operator by operator, which changes the tensors in `inputs`.

    Args:
        graph: as a backend of `torch.compile` gets it.
        inputs: those of the graph; with `double`, made by `copies(..., torch.float64)`.
        double: compute in float64 and without autocast what the graph computes in lower precision. Random numbers are
            drawn in the precision of the graph, so that they are the same.
    """
    with torch.enable_grad(), _InFloat64() if double else nullcontext():
        _Interpreter(graph, double).run(*inputs)


class _Interpreter(fx.Interpreter):
    """Runs a graph; what is recomputed in its backward is kept instead, which gives the same numbers."""

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
    """Compute in float64 wherever a lower precision is named."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            return _drawn(func, args, kwargs)
        args, kwargs = tree_map(_raised, (args, kwargs))
        return tree_map_only(Tensor, _in_float64, func(*args, **kwargs))


def _drawn(func: Any, args: Any, kwargs: Any) -> Any:
    """Draw random numbers as float32 does."""
    lower_args, lower_kwargs = tree_map_only(Tensor, _in_float32, (args, kwargs))
    out = func(*lower_args, **lower_kwargs)
    if func._schema.is_mutable and isinstance(args[0], Tensor):
        return args[0].copy_(out)
    return tree_map_only(Tensor, _in_float64, out)


def _raised(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _LOWER else value


def _in_float64(value: Tensor) -> Tensor:
    return value.to(torch.float64) if value.dtype in _LOWER else value


def _in_float32(value: Tensor) -> Tensor:
    return value.to(torch.float32) if value.dtype == torch.float64 else value
