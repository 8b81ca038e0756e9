"""Lever: compile the model in place, for training and validation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from slipstream.config import options
from slipstream.errors import ConfigError, did_you_mean

__all__ = ["CompileOptions", "compile_model", "read_compile"]


@dataclass(frozen=True)
class CompileOptions:
    """`compile=dict(...)`: the arguments of `torch.compile`."""

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


def read_compile(value: Any) -> CompileOptions | None:
    """Read `compile` as a configuration has it: True, False, None or a dict.

    Raises:
        ConfigError: anything else, or an unknown option.
    """
    if value is None or value is False:
        return None
    how = options(CompileOptions, {} if value is True else value, "compile")
    backends = torch._dynamo.list_backends(exclude_tags=())
    if isinstance(how.backend, str) and how.backend not in backends:
        raise ConfigError(
            f"'{how.backend}' is no backend of torch.compile{did_you_mean(how.backend, backends)}",
            "compile.backend",
        )
    return how


def compile_model(model: nn.Module, how: CompileOptions, warn: Callable[[str], None]) -> None:
    """Compile `model` in place: its parameters keep their names, and both modes run compiled.

    If it cannot be compiled, `warn` is called once with the reason and the model runs eagerly from then on.
    """
    given: Mapping[str, Any] = {
        "backend": how.backend,
        "mode": how.mode,
        "dynamic": how.dynamic,
        "fullgraph": how.fullgraph,
        "options": how.options,
    }
    try:
        model.compile(**given)
    except (RuntimeError, ValueError, TypeError, ImportError) as error:
        model._compiled_call_impl = None
        warn(_message(model, error))
        return
    compiled = model._compiled_call_impl
    if how.mode in ("reduce-overhead", "max-autotune") or (how.options or {}).get("triton.cudagraphs"):
        compiled = _keeping(compiled)
    model._compiled_call_impl = _Guarded(model, compiled, warn)


def _keeping(compiled: Any) -> Callable[..., Any]:
    """Copy what a replayed CUDA graph returns: the next replay would overwrite it, and logs are read later."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return tree_map_only(torch.Tensor, torch.clone, compiled(*args, **kwargs))

    return call


class _Guarded:
    """The compiled call of a module, until it fails to compile."""

    def __init__(self, model: nn.Module, compiled: Any, warn: Callable[[str], None]) -> None:
        self.model = model
        self.compiled = compiled
        self.warn = warn
        self.proven: set[bool] = set()  # whether calls without (False) and with gradient (True) have worked

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            if torch.is_grad_enabled() in self.proven:
                return self.compiled(*args, **kwargs)
            return self._prove(*args, **kwargs)
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            # A graph fails to compile before it runs, so the call can be made again.
            self.model._compiled_call_impl = None
            self.warn(_message(self.model, error))
            return self.model._call_impl(*args, **kwargs)

    def _prove(self, *args: Any, **kwargs: Any) -> Any:
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
        self.proven.add(torch.is_grad_enabled())
        return result


def _message(model: nn.Module, error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # "backend='inductor' raised:" says nothing without the line below it.
    reason = " ".join(lines[: 2 if lines[0].endswith("raised:") else 1]) if lines else "no reason given"
    return (
        f"{type(model).__name__} cannot be compiled ({type(error).__name__}: {reason}); it runs eagerly. "
        "Mend what the message names, or leave compile out"
    )
