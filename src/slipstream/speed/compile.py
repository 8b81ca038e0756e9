"""Speed option: compile the model, or each of its blocks, in place, for training and validation."""

from __future__ import annotations

import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from slipstream.config import optional
from slipstream.config.duration import read_duration
from slipstream.errors import ConfigError, did_you_mean
from slipstream.model.wrappers.fully_sharded import repeated_blocks
from slipstream.speed.blocks import find_modules
from slipstream.speed.compile_budget import BudgetedCall, Switch
from slipstream.speed.compile_report import explain_failure, failed_line, limit_cause
from slipstream.step.leaves import clone_tensors

__all__ = [
    "CompileOptions",
    "backend_problem",
    "compile_model",
    "compiled_blocks",
    "inductor_problem",
    "raised_recompile_limit",
    "read_compile",
]

_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_RECOMPILE_LIMIT = 8  # torch's default limit for one function


@dataclass(frozen=True)
class CompileOptions:
    """Options of `compile=dict(...)`: the scope of compilation and the arguments of `torch.compile`."""

    backend: Any = "inductor"
    """Name of a backend, or a callable."""
    mode: str | None = None
    """`default`, `reduce-overhead`, `max-autotune` or `max-autotune-no-cudagraphs`."""
    dynamic: bool | None = None
    """Whether shapes may vary; None detects this automatically."""
    fullgraph: bool = False
    """Whether a graph break is an error."""
    options: dict[str, Any] | None = None
    """Backend options."""
    scope: Literal["step", "model", "block"] | None = None
    """The unit that is compiled as one graph: the whole training step, the model's forward, or each of the model's
    blocks. None tries `step` and falls back to `model`."""
    blocks: list[str] = field(default_factory=list)
    """The blocks that scope 'block' compiles, as module names (`backbone.layer1`, or `layers.*` with wildcards) or
    class names. The default is the repeated blocks: children of a `ModuleList` or `Sequential` that themselves have
    children and whose class occurs at least twice."""
    cache: bool | str = True
    """Where to cache compiled code: True for the user's cache folder, a path, or False to disable the cache."""
    verify: bool = True
    """Whether to compare a compiled step with the eager step before its first use (scope 'step')."""
    wait: bool = False
    """Whether to compile before the second step instead of in the background (scope 'step', backend 'inductor', CPU,
    Linux). By default, steps run eagerly during compilation, so the number of eager steps depends on how long the
    compilation takes."""
    budget: float | str | None = None
    """Time limit for the compilation in each scope: a number of seconds, or a string such as `90s` or `5m`. If the
    limit is exceeded, a smaller scope is compiled, if possible. None means no limit, except in the background, where
    the limit is two hours."""

    def __post_init__(self) -> None:
        """Check the options and their combinations."""
        if self.budget is not None:
            read_duration(self.budget, "budget")
        if self.blocks and self.scope != "block":
            raise ConfigError(f"requires scope='block', not {self.scope!r}", "blocks")
        if self.backend == "inductor" and self.mode is not None and self.mode not in _MODES:
            raise ConfigError(
                f"must be one of {_MODES}, not {self.mode!r}{did_you_mean(self.mode, _MODES)}", "mode"
            )
        if self.mode is not None and self.options is not None:
            raise ConfigError("mode and options are mutually exclusive; remove one of them", "options")

    @property
    def seconds(self) -> float | None:
        """`budget` in seconds."""
        return None if self.budget is None else read_duration(self.budget, "budget")


def read_compile(value: Any) -> CompileOptions | None:
    """Read `compile`: True, False, None, a scope name, or a dict.

    Raises:
        ConfigError: the value has an unsupported type, or an option is unknown.
    """
    options = optional(CompileOptions, {"scope": value} if isinstance(value, str) else value, "compile")
    if options is None:
        return None
    backends = torch._dynamo.list_backends(exclude_tags=())
    if isinstance(options.backend, str) and options.backend not in backends:
        raise ConfigError(
            f"'{options.backend}' is not a backend of torch.compile{did_you_mean(options.backend, backends)}",
            "compile.backend",
        )
    return options


def compile_model(
    model: nn.Module, options: CompileOptions, warn: Callable[[str], None], warn_limit: bool = True
) -> None:
    """Compile `model` (with scope 'block', its blocks) in place, for training and evaluation.

    The keys of the state dict do not change. Call this function before the model is wrapped in DDP, and before
    `fully_shard` shards the blocks. Each module is compiled on its first call. If a module cannot be compiled, all
    blocks of its class run eagerly, and `warn` is called once with the reason.

    Args:
        model: the unwrapped model.
        options: the options.
        warn: called with a message if the model cannot be compiled as requested.
        warn_limit: whether to also call `warn` if torch's recompile limit is reached.

    Raises:
        ConfigError: `options.blocks` matches no module, or the model has no repeated blocks.
    """
    if (problem := backend_problem(model, options)) is not None:
        warn(f"torch.compile: {problem}. The model is not compiled")
        return
    modules = compiled_blocks(model, options) if options.scope == "block" else [model]
    limit = _limit_argument(len({repr(module) for module in modules}))
    by_class: dict[type[nn.Module], list[nn.Module]] = defaultdict(list)
    for module in modules:
        by_class[type(module)].append(module)
    switch = Switch(on=options.seconds is None)
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


def compiled_blocks(model: nn.Module, options: CompileOptions) -> list[nn.Module]:
    """Return the modules that scope 'block' compiles: the blocks that are not inside another block.

    Raises:
        ConfigError: a name matches no module, or `options.blocks` is empty and the model has no repeated blocks.
    """
    found = (
        find_modules(model, options.blocks, "compile.blocks") if options.blocks else _repeated_blocks(model)
    )
    inner = {child for block in found for child in block.modules() if child is not block}
    return list(dict.fromkeys(block for block in found if block not in inner))


def _repeated_blocks(model: nn.Module) -> list[nn.Module]:
    found = repeated_blocks(model)
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no repeated blocks; set compile.blocks or use scope='model'",
            "compile.blocks",
        )
    blocks = set(found)
    # Skip every nn.Sequential that contains blocks, because compiling it would require another graph.
    return [m for m in found if type(m) is not nn.Sequential or blocks.isdisjoint(list(m.modules())[1:])]


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
    for module in modules:
        try:
            compiled = torch.compile(
                _call_of(module, options.fullgraph), options=backend_options(options) or None, **kwargs
            )
        except (RuntimeError, ValueError, TypeError, ImportError) as error:
            group.give_up(module, error)
            return
        module._compiled_call_impl = _GuardedCall(
            module, _clone_outputs(compiled) if clones else compiled, group
        )


def backend_options(options: CompileOptions) -> dict[str, Any]:
    """Return the backend's options, including those that the mode sets."""
    defaults: dict[str, Any] = {}
    if options.backend == "inductor":
        # Draw the same random numbers (for dropout, for example) as eager training.
        defaults["fallback_random"] = True
        defaults |= torch._inductor.list_mode_options(options.mode) if options.mode else {}
    return defaults | (options.options or {})


def backend_problem(model: nn.Module, options: CompileOptions) -> str | None:
    """Return the reason why the backend cannot compile for the model's device, or None."""
    param = next(model.parameters(), None)
    return None if param is None or options.backend != "inductor" else inductor_problem(param.device.type)


def inductor_problem(device_type: str) -> str | None:
    """Return the reason why inductor cannot compile for this device type, or None."""
    from torch._inductor.codegen.common import get_scheduling_for_device, init_backend_registration

    init_backend_registration()
    if get_scheduling_for_device(device_type) is not None:
        return None
    return (
        f"inductor has no code generator for {device_type} in this installation of torch; install one, or choose "
        "a different backend, such as compile=dict(backend='aot_eager')"
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


def _limit_argument(kinds: int) -> Mapping[str, int]:
    """Return the recompile limit for blocks that share one code object, as keyword arguments of `torch.compile`."""
    return {"recompile_limit": kinds * _RECOMPILE_LIMIT} if kinds > 1 and _has_recompile_limit() else {}


@contextmanager
def raised_recompile_limit(kinds: int) -> Iterator[None]:
    """Raise torch's recompile limit within the context, if this version of torch has only a process-wide limit."""
    if kinds == 1 or _has_recompile_limit():
        yield
        return
    config: Any = torch._dynamo.config
    with config.patch(recompile_limit=max(kinds * _RECOMPILE_LIMIT, config.recompile_limit)):
        yield


def _has_recompile_limit() -> bool:
    return "recompile_limit" in inspect.signature(torch.compile).parameters


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
    # With fullgraph=True, torch 2.13 raises the second error after the call if no code was compiled.
    return isinstance(error, kinds) or "found no compiled frames" in str(error)
