"""Compile small steps on the CPU with inductor's C++ wrapper, which needs less time on the host than its Python code.

The C++ code contains the same kernels. It is called behind Dynamo's guards, without the wrappers and checks that torch
adds around compiled code. Torch caches it like any other compiled code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import getclosurevars
from pathlib import Path
from time import thread_time  # does not include the time of other processes
from timeit import repeat
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import has_free_symbols

from slipstream.speed.compile import Backend
from slipstream.step.verification import run_captured

__all__ = ["compile_step"]

_Run = Callable[..., Any]

# A step is small if the mean time of its eager operators, with their gradients, is below this number of seconds.
_MAX_OPERATOR_TIME = 200e-6
_MIN_GAIN = 1.1  # a step does not use oneDNN if this makes it faster by at least this factor


def compile_step(backend: Backend, info: _Run, graph: fx.GraphModule, inputs: Sequence[Any]) -> _Run:
    """Compile the graph of a step with inductor; call `info` with the reason if the C++ wrapper is not possible."""
    try:
        if _is_small(graph, inputs):
            return _compile(backend, graph, inputs)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        info(f"The step calls its kernels from Python, because inductor's C++ wrapper failed ({reason})")
    return backend(graph, inputs)


def _is_small(graph: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Measure whether the operators of a graph are so small that the time of the host matters.

    Returns False for graphs with dynamic shapes, with collectives, or on other devices than the CPU.
    """
    calls = [str(node.target) for node in graph.graph.nodes if node.op.startswith("call")]
    static = all(isinstance(x, Tensor) and x.is_cpu and not has_free_symbols(x) for x in inputs)
    if not static or any("_c10d_functional" in name for name in calls):
        return False
    with _outside_compiler(), torch.enable_grad():
        # Dynamo would examine each Python call.
        run: _Run = torch.compiler.disable(partial(run_captured, graph, _examples(inputs)))
        return min(repeat(run, timer=thread_time, repeat=5, number=1)) < len(calls) * _MAX_OPERATOR_TIME


def _compile(backend: Backend, graph: fx.GraphModule, inputs: Sequence[Any]) -> _Run:
    """Compile a graph with the C++ wrapper; return a function that calls the C++ code."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    found: list[_Run] = []

    def compile_inner(traced: fx.GraphModule, fakes: Sequence[Any], **kwargs: Any) -> Any:
        convolves = any("convolution" in str(node.target) for node in traced.graph.nodes)
        meta: Any = torch._guards.TracingContext.get().fw_metadata
        converts = (
            meta.num_mutated_inp_runtime_indices + meta.num_outputs_aliased + meta.num_intermediate_bases
        )
        if len(fakes) != len(inputs) or converts or torch._C._is_any_autocast_enabled():
            raise NotImplementedError(
                "its inputs or outputs share memory, or autocast is enabled around the step"
            )
        changed = meta.mutated_graph_handled_indices_seen_by_autograd
        code: Any = compile_fx_inner(traced, fakes, **kwargs)
        run, without = _direct(code, changed, True), _direct(code, changed, False)
        found.append(without if convolves and _is_slower(run, without, code, fakes) else run)
        return code

    settings = backend.settings | {"cpp_wrapper": True, "size_asserts": False}  # the guards check the sizes
    with torch._functorch.config.patch(enable_autograd_cache=False):  # it would not call `compile_inner`
        compile_fx(copy.deepcopy(graph), list(inputs), inner_compile=compile_inner, config_patches=settings)
    return found[0]


def _direct(code: Any, changed: Sequence[int], uses_onednn: bool) -> _Run:
    """Return a function that calls C++ code; autograd then knows that it has changed inputs with these indices."""
    entry, aoti = getclosurevars(code.current_callable).nonlocals["f"], cast("Any", torch._C._aoti)
    borrow, take = aoti.unsafe_alloc_void_ptrs_from_tensors, aoti.alloc_tensors_by_stealing_from_void_ptrs
    set_grad, set_onednn = torch._C._set_grad_enabled, torch._C._set_mkldnn_enabled

    def call(*values: Any) -> Any:
        had_grad, had_onednn = torch.is_grad_enabled(), uses_onednn or torch._C._get_mkldnn_enabled()
        set_grad(False)
        if not uses_onednn:
            set_onednn(False)
        try:
            outputs = take(entry(borrow(values)))
        finally:
            set_grad(had_grad)
            if not uses_onednn:
                set_onednn(had_onednn)
        if changed:
            torch.autograd.graph.increment_version([values[i] for i in changed])
        return outputs

    return call


def _is_slower(one: _Run, other: _Run, code: Any, fakes: Sequence[Tensor]) -> bool:
    """Measure whether one function is slower than the other; the result is stored in torch's cache folder."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    stored = Path(cache_dir()) / f"slipstream_onednn_{code._fx_graph_cache_key}"
    if code._fx_graph_cache_key is None or not stored.exists():
        with _outside_compiler():
            calls = [partial(form, *_examples(fakes)) for form in (one, other)]
            times = [min(repeat(call, timer=thread_time, repeat=20, number=1)) for call in calls]
        stored.write_text(str(times[0] > _MIN_GAIN * times[1]))
    return stored.read_text() == "True"


@contextmanager
def _outside_compiler() -> Iterator[None]:
    """Run operators as outside of a compilation, and restore the random state."""
    fake = torch._subclasses.fake_tensor.unset_fake_temporarily
    with torch._guards.tracing(None), fake(), torch.random.fork_rng([]):
        yield


def _examples(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of zeros with the metadata of the inputs."""
    empty = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in inputs]
    return [new.zero_().requires_grad_(x.requires_grad) for new, x in zip(empty, inputs, strict=True)]
