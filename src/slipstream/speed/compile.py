"""Speed option: compile the step, the model, or each of its blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from torch import fx, nn

from slipstream.errors import ConfigError, did_you_mean

__all__ = ["Backend", "CompileOptions", "inductor_problem"]

_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def _read_backend(value: Any) -> Any:
    backends = torch._dynamo.list_backends(exclude_tags=())
    if isinstance(value, str) and value not in backends:
        hint = did_you_mean(value, backends)
        raise ConfigError(f"'{value}' is not a backend of torch.compile{hint}", "compile.backend")
    return value


@dataclass(frozen=True)
class CompileOptions:
    """Options of `compile=dict(...)`: the scope of compilation and the arguments of `torch.compile`."""

    shorthand: ClassVar = "scope"

    backend: Annotated[Any, _read_backend] = "inductor"
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
    """Whether to compare compiled code with eager code before its first use."""

    def __post_init__(self) -> None:
        """Check the options and their combinations."""
        if self.blocks and self.scope != "block":
            raise ConfigError(f"requires scope='block', not {self.scope!r}", "blocks")
        if self.backend == "inductor" and self.mode is not None and self.mode not in _MODES:
            raise ConfigError(
                f"must be one of {_MODES}, not {self.mode!r}{did_you_mean(self.mode, _MODES)}", "mode"
            )
        if self.mode is not None and self.options is not None:
            raise ConfigError("mode and options are mutually exclusive; remove one of them", "options")


class Backend:
    """The compiler of the graphs of a module: `backend(graph, inputs)` returns the compiled code.

    Attributes:
        settings: the backend's options, including Slipstream's defaults and the options that the mode sets.
        problem: the reason why the backend cannot compile for the module's device, or None if it can.
    """

    def __init__(self, options: CompileOptions, module: nn.Module) -> None:
        self._backend, self._mode = options.backend, options.mode
        self.settings: dict[str, Any] = {}
        self.problem: str | None = None
        if options.backend == "inductor":
            from slipstream.speed.inductor import inductor_options

            param = next(module.parameters(), None)
            device_type = "cpu" if param is None else param.device.type
            self.problem = inductor_problem(device_type)
            # Draw the same random numbers (for dropout, for example) as eager training.
            self.settings = {**inductor_options(device_type), "fallback_random": True}
            self.settings |= torch._inductor.list_mode_options(options.mode) if options.mode else {}
        self.settings |= options.options or {}

    def __call__(self, graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        """Compile a graph."""
        if self._backend == "inductor":
            from torch._inductor.compile_fx import compile_fx

            compiled: Any = compile_fx(graph, inputs, config_patches=dict(self.settings))
        else:
            own = self._backend
            compiler = own if callable(own) else torch._dynamo.lookup_backend(own)
            kwargs = {"mode": self._mode, "options": dict(self.settings)}
            compiled = compiler(graph, inputs, **{key: value for key, value in kwargs.items() if value})
        # Remove torch's wrapper that disables Dynamo, because the callers already disable Dynamo.
        return cast("Callable[..., Any]", getattr(compiled, "_torchdynamo_orig_callable", compiled))


def inductor_problem(device_type: str) -> str | None:
    """Return the reason why inductor cannot compile for this device type, or None if it can."""
    from torch._inductor.codegen.common import get_scheduling_for_device, init_backend_registration

    init_backend_registration()
    if get_scheduling_for_device(device_type) is not None:
        return None
    return (
        f"inductor has no code generator for {device_type} in this installation of torch; install one, or choose "
        "a different backend, such as compile=dict(backend='aot_eager')"
    )
