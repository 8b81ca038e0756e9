"""Compile modules in place, and verify their graphs. This file is imported only if `compile` is set.

Training starts with eager calls. After the first backward pass, `Verifier` repeats one call of each kind of module on
copies, which compiles and verifies its graphs (`slipstream.step.replay`). Later calls use only these graphs: a call
that would need a new graph runs eagerly, and the next such call is repeated in the same way. Compilation therefore
never happens during a call, and a failed compilation has no effects.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from slipstream.devices import default_device
from slipstream.dist import get_world_size
from slipstream.model.blocks import find_blocks
from slipstream.optim import OptimWrapper, OptimWrapperDict
from slipstream.sharding import is_sharded
from slipstream.speed.compile import Backend, CompileOptions
from slipstream.speed.compile_report import explain_failure, failed_line, limit_cause
from slipstream.step.dynamo import capture_config, captured_code, changed_objects, prepare_graph
from slipstream.step.leaves import clone_tensors, leaves_of
from slipstream.step.parts import StepPart
from slipstream.step.replay import CapturedGraph, Recording
from slipstream.step.sync import any_rank
from slipstream.step.verification import NotCapturedError, WrongNumbersError, run_captured

__all__ = ["Verifier", "compile_model"]

Warn = Callable[[str], None]
_MAX_FRUITLESS = 8  # maximum number of repeated calls without a new graph


def compile_model(
    model: nn.Module,
    options: CompileOptions,
    warn: Warn,
    optim: OptimWrapper | None = None,
    info: Warn = lambda _: None,
) -> None:
    """Compile `model` (with scope 'block', its blocks) in place, for training and evaluation.

    The keys of the state dict do not change. The model may already be part of a DDP wrapper, or sharded by
    `fully_shard`. If a module cannot be compiled, or if its compiled code computes other results than eager mode, all
    modules of its class run eagerly, and `warn` is called once with the reason.

    Args:
        model: the unwrapped model.
        options: the options.
        warn: called with a message if the model cannot be compiled as requested.
        optim: the optimizer wrapper, or a dict of wrappers, whose update verifies graphs for training; without it,
            these are not verified.
        info: called with a message if a graph is not verified.

    Raises:
        ConfigError: a name in `options.blocks` matches no module, or `options.blocks` is empty and the model has no
            repeated blocks.
    """
    if (problem := Backend(options, model).problem) is not None:
        warn(f"torch.compile: {problem}. The model is not compiled")
        return
    modules = [model]
    if options.scope == "block":
        modules = find_blocks(model, options.blocks, "compile.blocks", containers=False)
    verifier = Verifier()
    classes: dict[type[nn.Module], list[nn.Module]] = defaultdict(list)
    equal: dict[tuple[type[nn.Module], str], list[nn.Module]] = defaultdict(list)
    for module in modules:
        classes[type(module)].append(module)
        equal[type(module), repr(module)].append(module)  # equal modules share their graphs
    for (cls, _), same in equal.items():
        kind = _Kind(
            verifier, cls.__name__, classes[cls], Backend(options, same[0]), options.verify, warn, info
        )
        name = f"{cls.__name__}[{len(verifier.kinds)}]"
        _compile(same, name, kind, dynamic=options.dynamic, fullgraph=options.fullgraph)
        verifier.kinds.append(kind)
    for wrapper in optim.values() if isinstance(optim, OptimWrapperDict) else [optim] if optim else []:
        wrapper.parts.append(verifier)
        verifier.attached = True


def _compile(modules: list[nn.Module], name: str, kind: _Kind, **config: Any) -> None:
    """Compile the modules of a kind, which share their graphs; `config` contains arguments of `torch.compile`."""
    # torch counts recompiles per code object, so each kind of module, in each model, has its own.
    code = _call_of(modules[0]).__code__.replace(co_name=name)
    backend = partial(_Kind.compile, weakref.proxy(kind))  # because torch never releases a backend
    for module in modules:
        call: Any = _call_of(module)
        call.__code__ = code
        compiled: Any = torch.compile(call, backend=backend, **config), torch._dynamo.run(call)
        if kind.backend.settings.get("triton.cudagraphs"):
            compiled = map(_clone_outputs, compiled)
        module._compiled_call_impl = _CompiledCall(module, kind, *compiled)


def _call_of(module: nn.Module) -> Callable[..., Any]:
    """Return a function that calls a module; torch.compile can silently skip a method that is defined in torch."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    return call


def _clone_outputs(compiled: Any) -> Callable[..., Any]:
    """Wrap a function so that its outputs are cloned, because the next replay of a CUDA graph overwrites them."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return clone_tensors(compiled(*args, **kwargs))

    return call


@dataclass(eq=False)
class _Kind:
    """Modules with the same code, which share their graphs.

    Attributes:
        verifier: repeats the recorded calls.
        name: the name of the class.
        modules: all modules of the class. If one of them cannot be compiled, all of them run eagerly.
        backend: the compiler of graphs.
        verifies: whether to verify graphs.
        warn: called with a message if the modules cannot be compiled as requested.
        info: called with a message if a graph is not verified.
        used: the graphs that the current call has used.
        known: the sequences of graphs that calls may use.
        hits: signatures of calls that use these graphs.
        searches: whether calls with other signatures may need a new graph.
        stopped: whether calls that need a new graph run eagerly from now on.
        fruitless: number of repeated calls since the last new graph.
        pending: the recorded call of this accumulation window, to be repeated after the backward pass.
        recording: the call that is being repeated with torch's kernels.
        error: the reason why a graph could not be compiled.
        eager: whether calls run eagerly until the update, because one did. Compiled code changes the version of
            buffers that autograd may keep for the eager call, such as BatchNorm's statistics.
        codes: the code objects of graphs that are not verified yet.
    """

    verifier: Verifier
    name: str
    modules: list[nn.Module]
    backend: Backend
    verifies: bool
    warn: Warn
    info: Warn
    used: list[CapturedGraph] = field(default_factory=list)
    known: set[tuple[CapturedGraph, ...]] = field(default_factory=set)
    hits: set[Any] = field(default_factory=set)
    searches: bool = True
    stopped: bool = False
    fruitless: int = 0
    pending: tuple[Recording, _CompiledCall, Any] | None = None
    recording: Recording | None = None
    error: Exception | None = None
    eager: bool = False
    codes: dict[CapturedGraph, CodeType] = field(default_factory=dict)

    def compile(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph captured by Dynamo. If this fails, the captured code runs, so that no call is interrupted."""
        added = prepare_graph(graph)
        try:
            captured = CapturedGraph(graph, self.backend(graph, inputs))
        except (torch._dynamo.exc.RestartAnalysis, *torch._dynamo.exc.exceptions_allowed_to_be_fallback):
            raise  # torch adds a graph break
        except Exception as error:
            self.error = self.error or error
            captured = CapturedGraph(graph, lambda *values: run_captured(graph, values))
        if self.recording is not None:
            self.recording.before.add(changed_objects())
            self.codes[captured] = captured_code()
        captured.verified = self.recording is None

        def run(*args: Any) -> Any:
            self.used.append(captured)
            if self.recording is not None:
                return captured.capture(args, self.recording)
            return captured.run(*args) if captured.verified else run_captured(graph, args)

        return (lambda *args: run(*args)[:-added]) if added else run

    def give_up(self, error: Exception) -> None:
        """Run all modules of the class eagerly, and warn with the reason."""
        for each in self.modules:
            each._compiled_call_impl = None
        if isinstance(error, WrongNumbersError):
            code = "compiled code" if error.compiler else "captured code"
            self.warn(
                f"The {code} of {self.name} differs from the eager module ({error}), so {self.name} runs eagerly"
            )
            return
        remedy = "Change this line of code, or remove" if failed_line(error) else "Remove"
        self.warn(
            f"{self.name} cannot be compiled ({explain_failure(error)}) and runs eagerly. {remedy} the `compile` option"
        )

    def accept(self, signature: Any, since: int) -> None:
        """Use the graphs of the current call, unless torch has reached its recompile limit after `since`."""
        self.known.add(tuple(self.used))
        self.hits.add(signature)
        if cause := limit_cause(since):
            self.stop()
            self.warn(
                f"{self.name} reached torch's recompile limit. Inputs that need a new graph run eagerly. Cause of the "
                f"last recompile: {cause}. Set compile=dict(dynamic=True), or use fewer batch shapes"
            )

    def stop(self) -> None:
        """Run calls that need a new graph eagerly from now on."""
        self.searches, self.stopped, self.pending = False, True, None

    def is_ready(self, params: Sequence[nn.Parameter]) -> bool:
        """Return whether there is a recorded call with gradients; drop a call that is outdated after the update."""
        if self.pending is None:
            return False
        recording = self.pending[0]
        grads = recording.gradients.values()
        is_outdated = not grads and not set(params).isdisjoint(recording.module.parameters())
        if is_outdated or not all(bool(grad.isfinite().all()) for grad in grads):
            self.pending = None
        return bool(grads) and self.pending is not None

    def verify(self) -> Exception | None:
        """Repeat the recorded call, and verify its new graphs; return the reason if its module must run eagerly."""
        assert self.pending is not None
        (recording, call, signature), self.pending = self.pending, None
        if recording.problem is not None:
            return NotCapturedError(recording.problem)
        since, self.recording = time.time_ns(), recording
        self.used.clear()
        try:
            with capture_config(autograd=False):
                is_finite = recording.verify(call.compiled)
            if self.error is not None or not is_finite:
                return self.error  # if gradients are not finite, verify a later call
            new = [graph for graph in dict.fromkeys(self.used) if not graph.verified]
            for graph in new:
                graph.verify(recording)
            self.searches, self.fruitless = False, 0 if new else self.fruitless + 1
            self.accept(signature, since)
            if self.fruitless > _MAX_FRUITLESS:
                self.stop()
        except Exception as error:
            return error
        finally:
            self.recording = None
            self.used.clear()
            self._forget()
        return None

    def _forget(self) -> None:
        """Remove graphs that are not verified from Dynamo's caches, because other calls may run the same code."""
        for graph, code in self.codes.items():
            if not graph.verified:
                torch._dynamo.reset_code(code)  # type: ignore[attr-defined]
        self.codes.clear()


class _CompiledCall:
    """The compiled call of a module."""

    def __init__(
        self, module: nn.Module, kind: _Kind, compiled: Callable[..., Any], known: Callable[..., Any]
    ) -> None:
        self.module, self.kind, self.compiled, self.run_known = module, kind, compiled, known

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kind = self.kind
        if torch.compiler.is_dynamo_compiling():  # the model becomes part of the graph that is being captured
            return self.module._call_impl(*args, **kwargs)
        grad = torch.is_grad_enabled()
        if kind.eager and grad:
            return self.module._call_impl(*args, **kwargs)
        if kind.searches and (signature := self._signature(args, kwargs)) not in kind.hits:
            return self._search(signature, args, kwargs)
        kind.used.clear()
        result = self.run_known(*args, **kwargs)
        if tuple(kind.used) not in kind.known:
            kind.eager |= grad and kind.verifier.attached
            if not kind.stopped:
                kind.hits.discard(self._signature(args, kwargs))
                kind.searches = True
        return result

    def _signature(self, args: Any, kwargs: Any) -> Any:
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), self.module.training
        leaves = (
            (leaf.dtype, leaf.shape, leaf.requires_grad) if type(leaf) is Tensor else type(leaf)
            for leaf in leaves_of((args, kwargs))
        )
        return modes, *leaves

    def _search(self, signature: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that may need a new graph."""
        kind, grad = self.kind, torch.is_grad_enabled()
        tensors = itertools.chain(self.module.parameters(), self.module.buffers())
        if any(map(is_lazy, tensors)) or any(
            each._backward_hooks or each._backward_pre_hooks for each in self.module.modules()
        ):
            # A repeated call would call the user's hooks again. The first call of a lazy module cannot be repeated.
            return self.module._call_impl(*args, **kwargs)
        if kind.verifies and any(map(is_sharded, self.module.parameters())):
            # A sharded module communicates in forward and backward, so its calls cannot be repeated.
            kind.verifies = False
            kind.info(f"The compiled code of {kind.name} is not verified, because its parameters are sharded")
        if not kind.verifies or (grad and not kind.verifier.attached):
            return self._compile(signature, args, kwargs)
        # A backward pass is active if this call is a recomputation.
        if torch._C._current_graph_task_id() != -1 or kind.pending is not None:
            return self.module._call_impl(*args, **kwargs)
        recording = Recording(self.module, args, kwargs)
        result = recording.run(args, kwargs)
        kind.pending = recording, self, signature
        kind.eager |= grad
        if not grad and (error := kind.verify()) is not None:
            kind.give_up(error)
        return result

    def _compile(self, signature: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compile a call and run it, without verification. If its compilation fails, run it eagerly."""
        kind, since = self.kind, time.time_ns()
        kind.used.clear()
        try:
            with capture_config(autograd=False):
                result = self.compiled(*args, **kwargs)
        except Exception as error:
            if not _is_compiler_error(error):
                raise
            # Dynamo fails before the graph runs, so the call can be repeated.
            kind.give_up(error)
            return self.module._call_impl(*args, **kwargs)
        if kind.error is not None:
            kind.give_up(kind.error)
        else:
            kind.accept(signature, since)
        return result


def _is_compiler_error(error: Exception) -> bool:
    """Return whether the error was raised by torch's compiler rather than by the model."""
    kinds = (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit)
    # With fullgraph=True, torch 2.13 raises a RuntimeError with this text after the call if no code was compiled.
    return isinstance(error, kinds) or "found no compiled frames" in str(error)


class Verifier(StepPart):
    """Verifies graphs after the backward pass and before the update, when recorded calls can be repeated.

    Several ranks verify graphs together, because the calls may communicate, and only in the first updates, because the
    ranks have to wait for each other.

    Attributes:
        kinds: the kinds of compiled modules.
        attached: whether the part belongs to an optimizer wrapper.
    """

    def __init__(self) -> None:
        self.kinds: list[_Kind] = []
        self.attached = False
        # With several ranks, the number of updates in which the ranks have looked for calls.
        self._attempts = 0

    def before_update(self, params: Sequence[nn.Parameter], grads: list[Tensor]) -> None:
        """Repeat the recorded calls."""
        for kind in self.kinds:
            kind.eager = False
        kinds = [kind for kind in self.kinds if kind.verifies]
        several = get_world_size() > 1 and bool(kinds)
        if several and self._attempts >= _MAX_FRUITLESS:
            for kind in kinds:
                if kind.searches:
                    kind.stop()
                    kind.info(
                        f"Calls of {kind.name} that need another graph run eagerly, because several ranks verify "
                        f"graphs only in the first {_MAX_FRUITLESS} updates"
                    )
            return
        ready = [kind.is_ready(params) for kind in kinds]
        if several:
            self._attempts += 1
            ready = [not other for other in any_rank([not own for own in ready], default_device())]
            for kind, yes in zip(kinds, ready, strict=True):
                kind.pending = kind.pending if yes else None
        failures = [kind.verify() if yes else None for kind, yes in zip(kinds, ready, strict=True)]
        if several and any(ready):
            failed = any_rank([failure is not None for failure in failures], default_device())
            other = WrongNumbersError("on another rank", compiler=True)
            failures = [own or (other if yes else None) for own, yes in zip(failures, failed, strict=True)]
        for kind, failure in zip(kinds, failures, strict=True):
            if failure is not None:
                kind.give_up(failure)
