"""Option: compile the model, or each of its blocks, in place, for training and validation."""

from __future__ import annotations

import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from slipstream.config import options
from slipstream.errors import ConfigError, did_you_mean
from slipstream.model.wrappers.fully_sharded import repeated_blocks
from slipstream.speed.blocks import named_blocks
from slipstream.speed.compile_report import explain_failure, limit_hit

__all__ = ["CompileOptions", "compile_model", "compiled_blocks", "read_compile"]

_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_RECOMPILES = 8  # torch's own limit for one function


@dataclass(frozen=True)
class CompileOptions:
    """`compile=dict(...)`: what is compiled, and the arguments of `torch.compile`."""

    backend: Any = "inductor"
    """A backend's name, or a callable."""
    mode: str | None = None
    """`default`, `reduce-overhead`, `max-autotune` or `max-autotune-no-cudagraphs`."""
    dynamic: bool | None = None
    """Whether shapes may vary; None finds out."""
    fullgraph: bool = False
    """Fail instead of breaking the graph."""
    options: dict[str, Any] | None = None
    """Options of the backend."""
    scope: Literal["step", "model", "block"] | None = None
    """What becomes one graph: the whole training step, the model's forward, or each of its blocks; None takes the
    widest that can be captured."""
    blocks: list[str] = field(default_factory=list)
    """Which blocks scope 'block' compiles: names of modules (`backbone.layer1`, with wildcards `layers.*`) or of
    classes. By default those that repeat: the children of a `ModuleList` or `Sequential` that have children of
    their own and are there at least twice."""
    cache: bool | str = True
    """Keep compiled code for the next start: in the user's cache folder (True), in a folder of yours, or not."""
    verify: bool = True
    """Compare the first compiled steps with eager ones before trusting them (scope 'step')."""
    wait: bool = False
    """Compile before the second step, instead of in the background while steps run eagerly (scope 'step', backend
    'inductor', CPU, Linux). The step at which the graph takes over then does not depend on how long it took."""

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        if self.blocks and self.scope != "block":
            raise ConfigError(f"needs scope='block', not {self.scope!r}", "blocks")


def read_compile(value: Any) -> CompileOptions | None:
    """Read `compile` as a configuration has it: True, False, None or a dict.

    Raises:
        ConfigError: anything else, or an unknown option.
    """
    if value is None or value is False:
        return None
    if isinstance(value, str):  # a scope by its name
        value = {"scope": value}
    how = options(CompileOptions, {} if value is True else value, "compile")
    if how.backend == "inductor" and how.mode is not None and how.mode not in _MODES:
        raise ConfigError(
            f"must be one of {_MODES}, not {how.mode!r}{did_you_mean(how.mode, _MODES)}", "compile.mode"
        )
    if how.mode is not None and how.options is not None:
        raise ConfigError("a mode stands for options: give one of the two", "compile.options")
    backends = torch._dynamo.list_backends(exclude_tags=())
    if isinstance(how.backend, str) and how.backend not in backends:
        raise ConfigError(
            f"'{how.backend}' is no backend of torch.compile{did_you_mean(how.backend, backends)}",
            "compile.backend",
        )
    return how


def compile_model(
    model: nn.Module, how: CompileOptions, warn: Callable[[str], None], tells_limit: bool = True
) -> int:
    """Compile `model`, or with scope 'block' its blocks, in place: keys stay, and both modes run compiled.

    Compile below DDP, and before `fully_shard` shards the blocks. What cannot be compiled runs eagerly from then on,
    and `warn` is called once with the reason; of the blocks, those of the same class do.

    Returns:
        How many unlike modules are compiled, for `CompileReport`; the graphs are made in the first calls.

    Raises:
        ConfigError: `how.blocks` names nothing in the model, or none of its blocks repeats.
    """
    modules = compiled_blocks(model, how) if how.scope == "block" else [model]
    kinds = len({repr(module) for module in modules})
    limit = _recompile_limit(kinds)
    by_class: dict[type[nn.Module], list[nn.Module]] = defaultdict(list)
    for module in modules:
        by_class[type(module)].append(module)
    for alike in by_class.values():
        _compile(alike, how, limit, _Group(alike, warn, tells_limit))
    return kinds


def compiled_blocks(model: nn.Module, how: CompileOptions) -> list[nn.Module]:
    """Return the modules that scope 'block' compiles; of blocks within blocks the outer ones.

    Raises:
        ConfigError: a name matches nothing, or no names are given and no block repeats.
    """
    found = named_blocks(model, how.blocks, "compile.blocks") if how.blocks else _repeating(model)
    inner = {child for block in found for child in block.modules() if child is not block}
    return list(dict.fromkeys(block for block in found if block not in inner))


def _repeating(model: nn.Module) -> list[nn.Module]:
    found = repeated_blocks(model)
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no blocks that repeat: name them, or take scope='model'",
            "compile.blocks",
        )
    blocks = set(found)
    # A stage, which is nothing but a sequence of blocks, would be compiled once for each stage.
    return [m for m in found if type(m) is not nn.Sequential or blocks.isdisjoint(list(m.modules())[1:])]


def _compile(modules: list[nn.Module], how: CompileOptions, limit: Mapping[str, int], group: _Group) -> None:
    """Compile modules of one class in place; if one of them fails, all run eagerly."""
    given: dict[str, Any] = {
        "backend": how.backend,
        "mode": None if how.backend == "inductor" else how.mode,
        "dynamic": how.dynamic,
        "fullgraph": how.fullgraph,
        **limit,
    }
    keeps = how.mode in ("reduce-overhead", "max-autotune") or (how.options or {}).get("triton.cudagraphs")
    for module in modules:
        try:
            compiled = torch.compile(_call_of(module), options=backend_options(how) or None, **given)
        except (RuntimeError, ValueError, TypeError, ImportError) as error:
            group.give_up(module, error)
            return
        module._compiled_call_impl = _Guarded(module, _keeping(compiled) if keeps else compiled, group)


def backend_options(how: CompileOptions) -> dict[str, Any]:
    """Return the options of the backend, those of the mode among them."""
    options: dict[str, Any] = {}
    if how.backend == "inductor":
        # Random numbers, of dropout for example, as eager training draws them.
        options["fallback_random"] = True
        if how.mode and how.options:
            raise ValueError("mode and options exclude each other")
        if how.mode and how.mode not in _MODES:
            raise ValueError(f"inductor has no mode '{how.mode}', only {', '.join(_MODES)}")
        options |= torch._inductor.list_mode_options(how.mode) if how.mode else {}
    return options | (how.options or {})


def _call_of(module: nn.Module) -> Callable[..., Any]:
    """Return what `nn.Module.compile` compiles, but such that torch's own modules are compiled, too."""
    forward = getattr(type(module), "forward", None)  # a scripted module's class has none
    if not str(getattr(forward, "__module__", "")).startswith("torch."):
        return module._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:  # torch compiles no function of its own files by itself
        return module._call_impl(*args, **kwargs)

    return call


def _recompile_limit(kinds: int) -> Mapping[str, int]:
    """Allow for the graphs of blocks that share a function and differ in shape: torch counts them together.

    Torch before 2.13 knows the limit as a switch of the process alone.
    """
    if kinds == 1:
        return {}
    limit = kinds * _RECOMPILES
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        return {"recompile_limit": limit}
    torch._dynamo.config.recompile_limit = max(limit, torch._dynamo.config.recompile_limit)
    return {}


def _keeping(compiled: Any) -> Callable[..., Any]:
    """Copy what a replayed CUDA graph returns: the next replay would overwrite it, and logs are read later."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return tree_map_only(torch.Tensor, torch.clone, compiled(*args, **kwargs))

    return call


class _Group:
    """Modules that are compiled together, and run eagerly together when one of them fails."""

    def __init__(
        self, modules: list[nn.Module], warn: Callable[[str], None], tells_limit: bool = True
    ) -> None:
        self.modules = modules
        self.warn = warn
        self.limited = not tells_limit

    def give_up(self, module: nn.Module, error: Exception) -> None:
        for each in self.modules:
            each._compiled_call_impl = None
        self.warn(
            f"{type(module).__name__} cannot be compiled ({explain_failure(error)}); it runs eagerly. "
            "Change the line above, or remove compile"
        )

    def notice(self, module: nn.Module, since: int) -> None:
        """Say it when torch has reached its limit of recompiles, as it leaves the rest uncompiled."""
        if not self.limited and (varied := limit_hit(since)):
            self.limited = True
            self.warn(
                f"{type(module).__name__} was compiled for too many kinds of calls: those that it knows stay "
                f"compiled, others run eagerly. It varied: {varied}. Give compile=dict(dynamic=True), or batches "
                "of fewer sizes"
            )


class _Guarded:
    """The compiled call of a module, until it fails to compile."""

    def __init__(self, model: nn.Module, compiled: Any, group: _Group) -> None:
        self.model = model
        self.compiled = compiled
        self.group = group
        self.counters = torch._dynamo.utils.counters
        self.worked: set[bool] = set()  # whether calls without (False) and with gradient (True) have worked

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # a graph around this one takes the model in
            return self.model._call_impl(*args, **kwargs)
        started, compilations = time.time_ns(), self.counters["frames"]["total"]
        try:
            worked = torch.is_grad_enabled() in self.worked
            result = self.compiled(*args, **kwargs) if worked else self._first_call(*args, **kwargs)
        except Exception as error:
            if not _of_the_compiler(error):
                raise
            # A graph fails to compile before it runs, so the call can be made again.
            self.group.give_up(self.model, error)
            return self.model._call_impl(*args, **kwargs)
        if self.counters["frames"]["total"] != compilations:
            self.group.notice(self.model, started)
        return result

    def _first_call(self, *args: Any, **kwargs: Any) -> Any:
        """Make the first call, with or without gradient, such that a failure leaves no trace in the model."""
        # Of several graphs the first may have run, and updated BatchNorm, when the second fails.
        before = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        try:
            # The graph of backward would be compiled in backward, where nothing can be made again.
            with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
                result = self.compiled(*args, **kwargs)
        except BaseException:
            with torch.no_grad():
                for buffer, old in before:
                    buffer.copy_(old)
            raise
        self.worked.add(torch.is_grad_enabled())
        return result


def _of_the_compiler(error: Exception) -> bool:
    """Say whether torch could not compile, as opposed to an error of the model's own."""
    kinds = (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit)
    # Of a forward that is kept from the compiler, with fullgraph=True, torch says so after the call.
    return isinstance(error, kinds) or "found no compiled frames" in str(error)
