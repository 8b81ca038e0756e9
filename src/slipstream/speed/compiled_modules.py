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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from slipstream.devices import default_device
from slipstream.dist import get_world_size
from slipstream.dist.collectives import all_reduce
from slipstream.sharding import is_sharded
from slipstream.speed.compile_report import explain_failure, failed_line, limit_cause
from slipstream.speed.inductor import backend_of
from slipstream.step.dynamo import capture_config, changed_objects, prepare_graph
from slipstream.step.leaves import clone_tensors, leaves_of
from slipstream.step.parts import StepPart
from slipstream.step.replay import CapturedGraph, Recording
from slipstream.step.verification import NotCapturedError, WrongNumbersError, run_captured

if TYPE_CHECKING:
    from slipstream.speed.compile import CompileOptions

__all__ = ["Verifier", "compile_modules"]

Warn = Callable[[str], None]
_MAX_FRUITLESS = 8
"""Maximum number of repeated calls without a new graph."""


def compile_modules(
    modules: list[nn.Module], options: CompileOptions, settings: Mapping[str, Any], warn: Warn, info: Warn
) -> Verifier:
    """Compile modules in place: the model, or blocks of the model. Equal modules share their graphs.

    Args:
        modules: the modules.
        options: the options.
        settings: the options of the backend.
        warn: called with a message if a module cannot be compiled as requested.
        info: called with a message if a graph is not verified.

    Returns:
        The step part that verifies graphs for training. Without an optimizer wrapper, these are not verified.
    """
    verifier = Verifier(info)
    groups: dict[type[nn.Module], dict[str, list[nn.Module]]] = defaultdict(lambda: defaultdict(list))
    for module in modules:
        groups[type(module)][repr(module)].append(module)
    for kinds in groups.values():
        group = _Group(warn)
        for number, kind in enumerate(kinds.values()):
            _compile(kind, number, group, options, settings, verifier)
    return verifier


def _compile(
    modules: list[nn.Module],
    number: int,
    group: _Group,
    options: CompileOptions,
    settings: Mapping[str, Any],
    verifier: Verifier,
) -> None:
    """Compile the modules of a kind, which share their graphs."""
    param = next(modules[0].parameters(), None)
    device_type = "cpu" if param is None else param.device.type
    group.modules += modules
    kind = _Kind(group, backend_of(options, settings, device_type), options.verify, verifier.info)
    verifier.kinds.append(kind)
    cuda_graphs = options.mode in ("reduce-overhead", "max-autotune") or settings.get("triton.cudagraphs")
    # torch counts recompiles per code object, so each kind of module, in each model, has its own.
    code = _call_of(modules[0]).__code__.replace(co_name=f"{type(modules[0]).__name__}[{number}]")
    own = weakref.ref(kind)  # because torch never releases a backend

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        kind = own()
        assert kind is not None
        return kind.backend(graph, inputs)

    for module in modules:
        call: Any = _call_of(module)
        call.__code__ = code
        compiled: Any = torch.compile(
            call, backend=backend, dynamic=options.dynamic, fullgraph=options.fullgraph
        )
        compiled = compiled, torch._dynamo.run(call)
        compiled = tuple(map(_clone_outputs, compiled)) if cuda_graphs else compiled
        module._compiled_call_impl = _CompiledCall(module, kind, verifier, *compiled)


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


class _Group:
    """Modules of one class. If one of them cannot be compiled, all of them run eagerly."""

    def __init__(self, warn: Warn) -> None:
        self.modules: list[nn.Module] = []
        self.warn, self.warn_limit = warn, True

    def give_up(self, error: Exception) -> None:
        """Run all modules eagerly, and warn with the reason."""
        name = type(self.modules[0]).__name__
        for each in self.modules:
            each._compiled_call_impl = None
        if isinstance(error, WrongNumbersError):
            code = "compiled code" if error.compiler else "captured code"
            self.warn(f"The {code} of {name} differs from the eager module ({error}), so {name} runs eagerly")
            return
        self.warn(
            f"{name} cannot be compiled ({explain_failure(error)}) and runs eagerly. "
            f"{'Change this line of code, or remove' if failed_line(error) else 'Remove'} the `compile` option"
        )

    def warn_if_limit_reached(self, since: int) -> bool:
        """Return whether torch has reached its recompile limit after `since` (`time.time_ns()`); warn once."""
        cause = limit_cause(since)
        if self.warn_limit and cause:
            self.warn_limit = False
            self.warn(
                f"{type(self.modules[0]).__name__} reached torch's recompile limit. Inputs that need a new graph run "
                f"eagerly. Cause of the last recompile: {cause}. Set compile=dict(dynamic=True), or use fewer batch "
                "shapes"
            )
        return bool(cause)


@contextmanager
def _compiling() -> Iterator[None]:
    """Apply the settings for compilation."""
    with capture_config(autograd=False), torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        yield


class _Kind:
    """Modules with the same code, which share their graphs."""

    def __init__(self, group: _Group, compiler: Callable[..., Any], verifies: bool, info: Warn) -> None:
        self.group, self.compiler, self.verifies, self.info = group, compiler, verifies, info
        self.used: list[CapturedGraph] = []
        """The graphs that the current call has used."""
        self.known: set[tuple[CapturedGraph, ...]] = set()
        """The sequences of graphs that verified calls use."""
        self.recording: Recording | None = None
        """The call that is being repeated with torch's kernels."""
        self.pending: tuple[Recording, _CompiledCall, Any] | None = None
        """The recorded call of this accumulation window, to be repeated after the backward pass."""
        self.error: Exception | None = None
        """The reason why a graph could not be compiled."""
        self.hits: set[Any] = set()
        """Signatures of calls that use verified graphs."""
        self.searches = True
        """Whether calls with other signatures may need a new graph."""
        self.fruitless = 0

    def backend(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph captured by Dynamo. If this fails, the captured code runs, so that no call is interrupted."""
        added = prepare_graph(graph)
        try:
            captured = CapturedGraph(graph, self.compiler(graph, inputs))
        except (torch._dynamo.exc.RestartAnalysis, *torch._dynamo.exc.exceptions_allowed_to_be_fallback):
            raise  # torch adds a graph break
        except Exception as error:
            self.error = self.error or error
            captured = CapturedGraph(graph, lambda *values: run_captured(graph, values))
        if self.recording is not None:
            self.recording.changed.add(changed_objects())
        captured.verified = self.recording is None

        def run(*args: Any) -> Any:
            self.used.append(captured)
            if self.recording is not None:
                return captured.capture(args, self.recording)
            return captured.run(*args) if captured.verified else run_captured(graph, args)

        return (lambda *args: run(*args)[:-added]) if added else run

    def verify(self, recording: Recording, call: _CompiledCall, signature: Any) -> Exception | None:
        """Repeat a call, compile and verify its new graphs; return the reason if its module must run eagerly."""
        if recording.problem is not None:
            return NotCapturedError(recording.problem)
        since, new = time.time_ns(), []
        self.recording = recording
        self.used.clear()
        try:
            with _compiling():
                recording.verify(call.compiled)
            if self.error is not None or recording.problem is not None:
                return self.error or NotCapturedError(recording.problem)
            sequence = tuple(self.used)
            if not recording.is_finite:
                return None  # verify a later call
            new = [graph for graph in dict.fromkeys(sequence) if not graph.verified]
            for graph in new:
                graph.verify(recording)
        except Exception as error:
            return error
        finally:
            self.recording = None
            self.used.clear()
        self.fruitless = 0 if new else self.fruitless + 1
        limited = self.group.warn_if_limit_reached(since) or self.fruitless > _MAX_FRUITLESS
        self.known.add(sequence)
        self.hits.add(signature)
        self.searches = False
        self.fruitless = _MAX_FRUITLESS + 1 if limited else self.fruitless
        return None

    def is_ready(self, params: Sequence[nn.Parameter]) -> bool:
        """Return whether there is a recorded call with gradients; drop a call that is outdated after the update."""
        if self.pending is None:
            return False
        recording = self.pending[0]
        if recording.gradients or not set(params).isdisjoint(recording.module.parameters()):
            if recording.has_finite_gradients():
                return True
            self.pending = None
        return False

    def verify_pending(self) -> Exception | None:
        """Verify the recorded call."""
        assert self.pending is not None
        pending, self.pending = self.pending, None
        return self.verify(*pending)

    def skip_verification(self, reason: str) -> None:
        """Use compiled code without verification from now on."""
        self.verifies = False
        self.info(
            f"The compiled code of {type(self.group.modules[0]).__name__} is not verified, because {reason}"
        )

    def stop_searching(self, reason: str) -> None:
        """Run calls that need a new graph eagerly from now on."""
        self.searches, self.pending, self.fruitless = False, None, _MAX_FRUITLESS + 1
        name = type(self.group.modules[0]).__name__
        self.info(f"Calls of {name} that need another graph run eagerly, because {reason}")

    def miss(self, signature: Any) -> None:
        """Note that a call needs a new graph."""
        if self.fruitless <= _MAX_FRUITLESS:
            self.hits.discard(signature)
            self.searches = True


class _CompiledCall:
    """The compiled call of a module."""

    def __init__(
        self, module: nn.Module, kind: _Kind, verifier: Verifier, compiled: Any, known: Callable[..., Any]
    ) -> None:
        self.module, self.kind, self.verifier = module, kind, verifier
        self.compiled, self.run_known = compiled, known
        self.succeeded: set[bool] = set()
        """Grad modes in which an unverified call has succeeded."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # the model becomes part of the graph that is being captured
            return self.module._call_impl(*args, **kwargs)
        kind = self.kind
        if kind.searches or not kind.verifies:
            return self._search(args, kwargs)
        kind.used.clear()
        result = self.run_known(*args, **kwargs)
        if tuple(kind.used) not in kind.known:
            kind.miss(self._signature(args, kwargs))
        return result

    def _signature(self, args: Any, kwargs: Any) -> Any:
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), self.module.training
        leaves = (
            (leaf.dtype, leaf.shape, leaf.requires_grad) if type(leaf) is Tensor else type(leaf)
            for leaf in leaves_of((args, kwargs))
        )
        return modes, *leaves

    def _search(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
            kind.skip_verification("its parameters are sharded")
        if not kind.verifies or (grad and not self.verifier.attached):
            return self._run_unverified(args, kwargs)
        signature = self._signature(args, kwargs)
        recomputes = torch._C._current_graph_task_id() != -1
        if signature in kind.hits or recomputes or kind.pending is not None:
            kind.used.clear()
            result = self.run_known(*args, **kwargs)
            if tuple(kind.used) not in kind.known:
                kind.hits.discard(signature)
            return result
        recording = Recording(self.module, args, kwargs)
        if recording.problem is not None:
            kind.group.give_up(
                NotCapturedError(
                    f"{recording.problem}, so that a call cannot be repeated to verify its compiled code"
                )
            )
            return self.module._call_impl(*args, **kwargs)
        result = recording.run(args, kwargs)
        if grad:
            kind.pending = recording, self, signature
        elif (error := kind.verify(recording, self, signature)) is not None:
            kind.group.give_up(error)
        return result

    def _run_unverified(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run compiled code without verification, with eager execution if compilation fails."""
        kind, grad = self.kind, torch.is_grad_enabled()
        counters = torch._dynamo.utils.counters
        started, compilations = time.time_ns(), counters["frames"]["total"]
        try:
            with ExitStack() as stack:
                if grad not in self.succeeded:
                    stack.enter_context(_compiling())
                result = self.compiled(*args, **kwargs)
            self.succeeded.add(grad)
        except Exception as error:
            if not _is_compiler_error(error):
                raise
            # Dynamo fails before the graph runs, so the call can be repeated.
            kind.group.give_up(error)
            return self.module._call_impl(*args, **kwargs)
        if kind.error is not None:
            kind.group.give_up(kind.error)
        elif counters["frames"]["total"] != compilations:
            kind.group.warn_if_limit_reached(started)
        kind.known.add(tuple(kind.used))
        kind.used.clear()
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
    """

    def __init__(self, info: Warn) -> None:
        self.info = info
        self.kinds: list[_Kind] = []
        self.attached = False
        """Whether the part belongs to an optimizer wrapper."""
        self._attempts = 0
        """With several ranks, the number of updates in which the ranks have looked for calls to verify."""

    def before_update(self, params: Sequence[nn.Parameter], grads: list[Tensor]) -> None:
        """Repeat the recorded calls."""
        kinds = [kind for kind in self.kinds if kind.verifies]
        several = get_world_size() > 1 and bool(kinds)
        if several and self._attempts >= _MAX_FRUITLESS:
            for kind in kinds:
                if kind.searches:
                    kind.stop_searching(
                        f"several ranks verify graphs only in the first {_MAX_FRUITLESS} updates"
                    )
            return
        ready = [kind.is_ready(params) for kind in kinds]
        if several:
            ready, self._attempts = _on_all_ranks(ready), self._attempts + 1
            for kind in kinds:
                kind.pending = kind.pending if kind in itertools.compress(kinds, ready) else None
        failures = {kind: kind.verify_pending() for kind, yes in zip(kinds, ready, strict=True) if yes}
        if several and failures:
            equal = _on_all_ranks([failure is None for failure in failures.values()])
            for (kind, failure), is_equal in zip(failures.items(), equal, strict=True):
                if failure is None and not is_equal:
                    failures[kind] = WrongNumbersError("on another rank", compiler=True)
        for kind, failure in failures.items():
            if failure is not None:
                kind.group.give_up(failure)


def _on_all_ranks(flags: Sequence[bool]) -> list[bool]:
    """Return, for each flag, whether it is set on all ranks."""
    values = torch.tensor(flags, dtype=torch.float32, device=default_device())
    all_reduce(values, "min")
    return [value > 0 for value in values.tolist()]
