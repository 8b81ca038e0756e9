"""Replay a compiled step as one CUDA graph: a step then costs the host one launch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["CudaCapture", "Replayed"]

_WARM_UPS = 3  # as torch advises: kernels are chosen and workspaces made before the capture
_KINDS = 16  # of calls; each has a recording of its own, with memory of its own


class Capture(Protocol):
    """How a device records work."""

    def warm_up(self, run: Callable[[], Any]) -> Any:
        """Do the work where its allocations do not hinder a later recording."""

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Record the work without doing it; return its outputs, and what does it."""


class CudaCapture:
    """Recording by `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def warm_up(self, run: Callable[[], Any]) -> Any:
        """Do the work on a stream beside the current one."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            outputs = run()
        torch.cuda.current_stream().wait_stream(self._stream)
        return outputs

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Record the work as a CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            outputs = run()
        return outputs, graph.replay


class Replayed:
    """A function of tensors that is recorded at its fourth call with inputs of the same shapes, and then replayed.

    The first calls are steps like any others, and recording changes nothing, so that no state (BatchNorm's
    statistics, for instance) has to be put back. Tensors in the inputs are copied to fixed places; what is returned are
    copies. Everything else that the function reads or changes must stay where it is. Calls of a seventeenth kind are
    not recorded.

    Args:
        run: the function; it must not wait for the device.
        capture: how its work is recorded.
        depends: returns what else decides which work it is: a replay asks nobody, and would not notice a change.
        warn: is told, once, that there were too many kinds of calls.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        capture: Capture,
        depends: Callable[[], Hashable] = tuple,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self._run, self._capture = run, capture
        self._depends, self._warn = depends, warn
        self._calls: dict[Any, int] = {}
        self._recorded: dict[Any, tuple[list[Tensor], Any, Callable[[], None]]] = {}

    def __call__(self, *args: Any) -> Any:
        """Call or replay the function."""
        leaves = (
            (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(args)
        )
        key = (*leaves, self._depends())
        if key not in self._recorded:
            if len(self._calls) == _KINDS and key not in self._calls:
                return self._directly(*args)
            count = self._calls[key] = self._calls.get(key, 0) + 1
            if count <= _WARM_UPS:
                return self._capture.warm_up(lambda: self._run(*args))
            fixed = tree_map_only(Tensor, torch.clone, args)
            outputs, replay = self._capture.record(lambda: self._run(*fixed))
            self._recorded[key] = (_tensors(fixed), outputs, replay)
        places, outputs, replay = self._recorded[key]
        torch._foreach_copy_(places, _tensors(args))
        replay()
        return tree_map_only(Tensor, torch.clone, outputs)

    def _directly(self, *args: Any) -> Any:
        if self._warn is not None:
            self._warn(
                f"More than {_KINDS} kinds of steps: further ones are not replayed as CUDA graphs. Shapes vary, or a "
                "file name or number in the batch, or a setting of the optimizer: leave that out, or cuda_graph"
            )
            self._warn = None
        return self._run(*args)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
