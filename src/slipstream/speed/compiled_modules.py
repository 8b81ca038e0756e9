"""Compile modules in place, with eager execution as a fallback. This file is imported only if `compile` is set."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slipstream.speed.compile_report import explain_failure, failed_line, limit_cause
from slipstream.speed.inductor import inductor_options
from slipstream.step.leaves import clone_tensors

if TYPE_CHECKING:
    from slipstream.speed.compile import CompileOptions

__all__ = ["compile_modules"]

Warn = Callable[[str], None]


def compile_modules(
    modules: list[nn.Module], options: CompileOptions, settings: Mapping[str, Any], warn: Warn
) -> None:
    """Compile modules in place: the model, or blocks of the model. Equal modules share their graphs.

    Args:
        modules: the modules.
        options: the options.
        settings: the options of the backend.
        warn: called with a message if a module cannot be compiled as requested.
    """
    groups: dict[type[nn.Module], _Group] = {}
    for module in modules:
        groups.setdefault(type(module), _Group(warn)).modules.append(module)
    for group in groups.values():
        _compile(group, options, settings)


def _compile(group: _Group, options: CompileOptions, settings: Mapping[str, Any]) -> None:
    kwargs: dict[str, Any] = {
        "backend": options.backend,
        "mode": None if options.backend == "inductor" else options.mode,
        "dynamic": options.dynamic,
        "fullgraph": options.fullgraph,
    }
    if options.backend == "inductor":
        param = next(group.modules[0].parameters(), None)
        settings = {**inductor_options("cpu" if param is None else param.device.type), **settings}
    cuda_graphs = options.mode in ("reduce-overhead", "max-autotune") or settings.get("triton.cudagraphs")
    kinds: dict[str, list[nn.Module]] = defaultdict(list)
    for module in group.modules:
        kinds[repr(module)].append(module)
    for number, kind in enumerate(kinds.values()):
        # torch counts recompiles per code object, so each kind of module, in each model, has its own.
        code = _call_of(kind[0]).__code__.replace(co_name=f"{type(kind[0]).__name__}[{number}]")
        for module in kind:
            call: Any = _call_of(module)
            call.__code__ = code
            try:
                # torch.compile removes keys from the dict.
                compiled = torch.compile(call, options=dict(settings) or None, **kwargs)
            except (RuntimeError, ValueError, TypeError, ImportError) as error:
                group.give_up(module, error)
                return
            compiled = _clone_outputs(compiled) if cuda_graphs else compiled
            module._compiled_call_impl = _GuardedCall(module, compiled, group)


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

    def give_up(self, module: nn.Module, error: Exception) -> None:
        for each in self.modules:
            each._compiled_call_impl = None
        self.warn(
            f"{type(module).__name__} cannot be compiled ({explain_failure(error)}) and runs eagerly. "
            f"{'Change this line of code, or remove' if failed_line(error) else 'Remove'} the `compile` option"
        )

    def warn_if_limit_reached(self, module: nn.Module, since: int) -> None:
        """Warn once if torch has reached its recompile limit after `since` (`time.time_ns()`)."""
        if self.warn_limit and (cause := limit_cause(since)):
            self.warn_limit = False
            self.warn(
                f"{type(module).__name__} reached torch's recompile limit. Inputs that need a new graph run eagerly. "
                f"Cause of the last recompile: {cause}. Set compile=dict(dynamic=True), or use fewer batch shapes"
            )


class _GuardedCall:
    """The compiled call of a module, with a fallback to eager execution if compilation fails."""

    def __init__(self, model: nn.Module, compiled: Any, group: _Group) -> None:
        self.model, self.compiled, self.group = model, compiled, group
        self.counters = torch._dynamo.utils.counters
        self.succeeded: set[bool] = set()
        """Grad modes (`torch.is_grad_enabled()`) in which a call has succeeded."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # the model becomes part of the graph that is being captured
            return self.model._call_impl(*args, **kwargs)
        started, compilations = time.time_ns(), self.counters["frames"]["total"]
        try:
            succeeded = torch.is_grad_enabled() in self.succeeded
            result = self.compiled(*args, **kwargs) if succeeded else self._first_call(*args, **kwargs)
        except Exception as error:
            if not _is_compiler_error(error):
                raise
            # Compilation fails before the graph runs, so the call can be repeated.
            self.group.give_up(self.model, error)
            return self.model._call_impl(*args, **kwargs)
        if self.counters["frames"]["total"] != compilations:
            self.group.warn_if_limit_reached(self.model, started)
        return result

    def _first_call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module for the first time in this grad mode; restore its buffers if the call fails."""
        # With graph breaks, an earlier graph may have updated BatchNorm statistics before a later graph fails.
        before = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        try:
            # Compile the backward graph now, because a failure during backward is not recoverable.
            with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
                result = self.compiled(*args, **kwargs)
        except BaseException:
            with torch.no_grad():
                for buffer, old in before:
                    buffer.copy_(old)
            raise
        self.succeeded.add(torch.is_grad_enabled())
        return result


def _is_compiler_error(error: Exception) -> bool:
    """Return whether the error was raised by torch's compiler rather than by the model."""
    kinds = (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit)
    # With fullgraph=True, torch 2.13 raises a RuntimeError with this text after the call if no code was compiled.
    return isinstance(error, kinds) or "found no compiled frames" in str(error)
