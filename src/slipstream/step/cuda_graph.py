"""Replay a compiled step as one CUDA graph, which requires only a single launch from the host."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

__all__ = ["CudaCapture", "CudaGraphs"]

_WARM_UPS = 3  # recommended by torch; the warm-up runs select kernels and allocate workspaces
_MAX_GRAPHS = 16  # capturing a graph takes time, and its inputs and outputs require memory


class CudaCapture:
    """Captures kernels with `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        # The graphs can share memory, because they never run at the same time and their outputs are copied.
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, run: Callable[[], Any]) -> Any:
        """Run the function on a side stream."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            outputs = run()
        torch.cuda.current_stream().wait_stream(self._stream)
        return outputs

    def capture(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Capture the function as a CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        # In "thread_local" mode, other threads may call CUDA during the capture, for example to pin memory.
        # If a capture fails, torch does not restore the current stream; the outer context does.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"),
        ):
            outputs = run()
        return outputs, graph.replay


class CudaGraphs:
    """Captures calls to a function as CUDA graphs, and replays them.

    Calls are of the same kind if they have the same function, tensor shapes and dtypes. The fourth call of each kind is
    captured. The first three run normally, and the capture does not run kernels, so no state (such as BatchNorm
    statistics) needs to be restored. Before a replay, the arguments are copied to static buffers. Arguments that the
    function changes in place are copied back after the replay. Outputs are copied. All other tensors that the function
    reads or changes must be on the device and keep their addresses. At most 16 graphs are captured; other kinds of
    calls run without a graph. If a capture fails, all later calls run without a graph.

    Args:
        capture: captures the kernels of a call.
        warn: called once if there are more than 16 kinds of calls, or if a capture fails.
    """

    def __init__(self, capture: CudaCapture, warn: Callable[[str], object]) -> None:
        self._capture, self._warn = capture, warn
        self._calls: dict[Any, int] = {}
        self._graphs: dict[Any, _Graph] = {}
        self._failed = False
        # A graph with collectives must be released before its process group. `atexit` calls functions in reverse
        # order of registration. When a multiprocessing child exits, only finalizers run, and the finalizer that
        # destroys the process group (`dist/failure_detection.py`) has a lower priority.
        release = self._graphs.clear
        atexit.register(release)
        Finalize(self, release, exitpriority=0)

    def __call__(self, run: Callable[[list[Tensor]], Any], tensors: list[Tensor]) -> Any:
        """Call `run(tensors)`, or replay the CUDA graph of this call; `run` must not synchronize with the device."""
        if self._failed:
            return run(tensors)
        key = (run, *((tensor.shape, tensor.dtype) for tensor in tensors))
        graph = self._graphs.get(key)
        if graph is None:
            if len(self._calls) == _MAX_GRAPHS and key not in self._calls:
                self._warn(
                    f"The step needs more than {_MAX_GRAPHS} CUDA graphs, so new kinds of batches run without one; "
                    "keep the shapes in the batch constant, or remove cuda_graph"
                )
                self._warn = lambda _: None  # warn once
                return run(tensors)
            count = self._calls[key] = self._calls.get(key, 0) + 1
            if count <= _WARM_UPS:
                return self._capture.warm_up(lambda: run(tensors))
            try:
                graph = self._graphs[key] = _Graph(run, tensors, self._capture)
            except Exception as error:
                self._failed = True
                self._graphs.clear()
                self._warn(
                    f"The step cannot be captured as a CUDA graph ({error}), so it runs without one. Fix the "
                    "cause, or remove cuda_graph to silence this warning"
                )
                return run(tensors)
        return graph(tensors)


class _Graph:
    """A captured call."""

    def __init__(
        self, run: Callable[[list[Tensor]], Any], tensors: list[Tensor], capture: CudaCapture
    ) -> None:
        self._inputs = [tensor.clone() for tensor in tensors]
        versions = [tensor._version for tensor in self._inputs]
        self._outputs, self._replay = capture.capture(lambda: run(self._inputs))
        inputs = zip(self._inputs, versions, strict=True)
        self._changed = [i for i, (tensor, version) in enumerate(inputs) if tensor._version != version]

    def __call__(self, tensors: list[Tensor]) -> Any:
        if tensors:
            torch._foreach_copy_(self._inputs, tensors)
        self._replay()
        if self._changed:
            torch._foreach_copy_(
                [tensors[i] for i in self._changed], [self._inputs[i] for i in self._changed]
            )
        return tree_map_only(Tensor, torch.clone, self._outputs)
