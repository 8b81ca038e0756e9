"""Replay a compiled step as one CUDA graph, which costs the host a single launch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["CudaCapture", "Replayed"]

_WARM_UPS = (
    3  # torch recommends warm-up runs, which select kernels and allocate workspaces before the capture
)
_MAX_GRAPHS = 16  # each graph has its own memory


class Capture(Protocol):
    """Interface for capturing the kernels of a function."""

    def warm_up(self, run: Callable[[], Any]) -> Any:
        """Run the function such that its allocations do not affect a later capture."""

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Capture the function without running its kernels; return its outputs and a function that replays it."""


class CudaCapture:
    """Capture with `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def warm_up(self, run: Callable[[], Any]) -> Any:
        """Run the function on a side stream."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            outputs = run()
        torch.cuda.current_stream().wait_stream(self._stream)
        return outputs

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Capture the function as a CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            outputs = run()
        return outputs, graph.replay


class Replayed:
    """A function of tensors that is captured at its fourth call with inputs of the same shapes, and then replayed.

    The first calls run normally, and the capture does not run kernels, so no state (for example BatchNorm's statistics)
    must be restored. Input tensors are copied to static buffers, and outputs are copies. All other tensors that the
    function reads or changes must keep their addresses. At most 16 graphs are captured; further kinds of calls run
    without a graph.

    Args:
        run: the function; it must not wait for the device.
        capture: captures its kernels.
        depends: returns the other values that the captured kernels depend on; a change selects another graph.
        warn: called once if there are more than 16 kinds of calls.
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
        self._graphs: dict[Any, tuple[list[Tensor], Any, Callable[[], None]]] = {}

    def __call__(self, *args: Any) -> Any:
        """Call or replay the function."""
        leaves = (
            (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(args)
        )
        key = (*leaves, self._depends())
        if key not in self._graphs:
            if len(self._calls) == _MAX_GRAPHS and key not in self._calls:
                return self._directly(*args)
            count = self._calls[key] = self._calls.get(key, 0) + 1
            if count <= _WARM_UPS:
                return self._capture.warm_up(lambda: self._run(*args))
            static = tree_map_only(Tensor, torch.clone, args)
            outputs, replay = self._capture.record(lambda: self._run(*static))
            self._graphs[key] = (_tensors(static), outputs, replay)
        buffers, outputs, replay = self._graphs[key]
        torch._foreach_copy_(buffers, _tensors(args))
        replay()
        return tree_map_only(Tensor, torch.clone, outputs)

    def _directly(self, *args: Any) -> Any:
        if self._warn is not None:
            self._warn(
                f"The step needs more than {_MAX_GRAPHS} CUDA graphs; other kinds of batches run without one. Shapes, "
                "strings or numbers in the batch, or optimizer settings change too often: keep them constant, or "
                "remove cuda_graph"
            )
            self._warn = None
        return self._run(*args)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
