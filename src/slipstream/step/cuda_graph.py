"""Replay a compiled step as one CUDA graph: a step then costs the host one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["CudaCapture", "RecordedCalls"]

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


class RecordedCalls:
    """Records calls at the fourth with the same function and inputs of the same shapes, and then replays them.

    The first calls are steps like any others, and recording changes nothing, so that no state (BatchNorm's
    statistics, for instance) has to be put back. Tensors among the arguments are copied to fixed addresses before a
    replay; those that the function changes in place are copied back after it. What is returned are copies. Everything
    else that the function reads or changes must keep its address. Calls of a seventeenth kind are not recorded.

    Args:
        capture: how a device records work.
        warn: called once if there are too many kinds of calls.
    """

    def __init__(self, capture: Capture, warn: Callable[[str], None] | None = None) -> None:
        self._capture, self._warn = capture, warn
        self._calls: dict[Any, int] = {}
        self._recorded: dict[Any, _Recording] = {}

    def __call__(self, run: Callable[..., Any], arguments: Any) -> Any:
        """Call `run(arguments)`, which must not wait for the device, or replay it."""
        leaves = (
            (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(arguments)
        )
        key = (run, *leaves)
        recording = self._recorded.get(key)
        if recording is None:
            if len(self._calls) == _KINDS and key not in self._calls:
                return self._directly(run, arguments)
            count = self._calls[key] = self._calls.get(key, 0) + 1
            if count <= _WARM_UPS:
                return self._capture.warm_up(lambda: run(arguments))
            recording = self._recorded[key] = _Recording(run, arguments, self._capture)
        return recording(arguments)

    def _directly(self, run: Callable[..., Any], arguments: Any) -> Any:
        if self._warn is not None:
            self._warn(
                f"More than {_KINDS} kinds of steps: further ones are not replayed as CUDA graphs. Shapes vary, or a "
                "file name or number in the batch, or a setting of the optimizer: leave that out, or cuda_graph"
            )
            self._warn = None
        return run(arguments)


class _Recording:
    """A call that is recorded."""

    def __init__(self, run: Callable[..., Any], arguments: Any, capture: Capture) -> None:
        fixed = tree_map_only(Tensor, torch.clone, arguments)
        self._places = _tensors(fixed)
        versions = [tensor._version for tensor in self._places]
        self._outputs, self._replay = capture.record(lambda: run(fixed))
        places = zip(self._places, versions, strict=True)
        self._changed = [i for i, (tensor, version) in enumerate(places) if tensor._version != version]

    def __call__(self, arguments: Any) -> Any:
        given = _tensors(arguments)
        torch._foreach_copy_(self._places, given)
        self._replay()
        if self._changed:
            torch._foreach_copy_([given[i] for i in self._changed], [self._places[i] for i in self._changed])
        return tree_map_only(Tensor, torch.clone, self._outputs)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
