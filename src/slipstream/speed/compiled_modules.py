"""Compile modules in place, with eager execution as a fallback. This file is imported only if `compile` is set."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from slipstream.model.wrappers.fully_sharded import repeated_blocks
from slipstream.speed.compile import CompileOptions, backend_options, compile_model
from slipstream.speed.compile_budget import BudgetedCall, Switch
from slipstream.speed.compile_report import explain_failure, failed_line, limit_cause
from slipstream.speed.inductor_options import inductor_options
from slipstream.step.leaves import clone_tensors

__all__ = ["compile_modules"]


def compile_modules(
    model: nn.Module,
    modules: list[nn.Module],
    options: CompileOptions,
    limit: Mapping[str, int],
    warn: Callable[[str], None],
    warn_limit: bool,
) -> None:
    """Compile modules of a model in place.

    Args:
        model: the unwrapped model.
        modules: the modules to compile: blocks of the model, or only the model.
        options: the options.
        limit: the recompile limit, as keyword arguments of `torch.compile`.
        warn: called with a message if a module cannot be compiled as requested.
        warn_limit: whether to also call `warn` if torch's recompile limit is reached.
    """
    switch = Switch(on=options.seconds is None)
    by_class: dict[type[nn.Module], list[nn.Module]] = defaultdict(list)
    for module in modules:
        by_class[type(module)].append(module)
    for same_class in by_class.values():
        _compile(same_class, options, limit, _Group(same_class, warn, warn_limit, switch))
    if options.seconds is not None and any(module._compiled_call_impl is not None for module in modules):
        _limit_time(model, modules, options, options.seconds, switch, warn)


def _limit_time(
    model: nn.Module,
    modules: list[nn.Module],
    options: CompileOptions,
    seconds: float,
    switch: Switch,
    warn: Callable[[str], None],
) -> None:
    """Compile a model within a time limit. If the limit is exceeded, compile only the repeated blocks, or nothing."""
    name = type(model).__name__

    def on_exceeded(training: bool) -> None:
        why = f"because its compilation takes longer than compile.budget ({seconds:g} s)"
        remedy = "Increase the budget, or set"
        if not training:
            warn(f"{name} is evaluated eagerly, {why}. {remedy} compile=False")
        elif options.scope == "block" or not repeated_blocks(model):
            for module in (model, *modules):
                module._compiled_call_impl = None
            warn(f"{name} runs eagerly, {why}. {remedy} compile=False")
        else:
            model._compiled_call_impl = None
            warn(
                f"Only the repeated blocks of {name} are compiled, not the whole model, {why}. {remedy} "
                "compile=dict(scope='block')"
            )
            compile_model(model, replace(options, scope="block"), warn, warn_limit=False)

    call = model._compiled_call_impl or model._call_impl
    model._compiled_call_impl = BudgetedCall(model, call, switch, seconds, options.wait, on_exceeded)


def _compile(
    modules: list[nn.Module], options: CompileOptions, limit: Mapping[str, int], group: _Group
) -> None:
    """Compile modules of one class in place. If one of them cannot be compiled, all of them run eagerly."""
    kwargs: dict[str, Any] = {
        "backend": options.backend,
        "mode": None if options.backend == "inductor" else options.mode,
        "dynamic": options.dynamic,
        "fullgraph": options.fullgraph,
        **limit,
    }
    clones = options.mode in ("reduce-overhead", "max-autotune") or (options.options or {}).get(
        "triton.cudagraphs"
    )
    defaults: dict[str, Any] = {}
    if options.backend == "inductor":
        param = next(modules[0].parameters(), None)
        defaults = inductor_options("cpu" if param is None else param.device.type)
    settings = defaults | backend_options(options)
    for module in modules:
        try:
            # torch.compile removes keys from the dict.
            compiled = torch.compile(
                _call_of(module, options.fullgraph), options=dict(settings) or None, **kwargs
            )
        except (RuntimeError, ValueError, TypeError, ImportError) as error:
            group.give_up(module, error)
            return
        module._compiled_call_impl = _GuardedCall(
            module, _clone_outputs(compiled) if clones else compiled, group
        )


def _call_of(module: nn.Module, fullgraph: bool) -> Callable[..., Any]:
    """Return the function to compile for a module, wrapped if torch might silently skip the original.

    torch.compile can silently skip `Module._call_impl`, because it is defined in torch. This always happens for torch's
    own modules, and for other modules if their `forward` cannot be traced. In the second case, torch 2.11 and 2.12
    report no error even with `fullgraph`.
    """
    forward = getattr(type(module), "forward", None)  # a scripted module has no Python code
    if not (fullgraph or str(getattr(forward, "__module__", "")).startswith("torch.")):
        return module._call_impl

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

    def __init__(
        self, modules: list[nn.Module], warn: Callable[[str], None], warn_limit: bool, switch: Switch
    ) -> None:
        self.modules = modules
        self.warn = warn
        self.warn_limit = warn_limit
        self.switch = switch

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
        self.model = model
        self.compiled = compiled
        self.group = group
        self.counters = torch._dynamo.utils.counters
        self.succeeded: set[bool] = (
            set()
        )  # grad modes (torch.is_grad_enabled()) in which a call has succeeded

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # If a graph is being captured, the model becomes part of that graph.
        if torch.compiler.is_dynamo_compiling() or not self.group.switch.runs_compiled():
            return self.model._call_impl(*args, **kwargs)
        started, compilations = time.time_ns(), self.counters["frames"]["total"]
        try:
            succeeded = torch.is_grad_enabled() in self.succeeded
            with self.group.switch.stance():
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
