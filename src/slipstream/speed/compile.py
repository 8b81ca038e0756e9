"""Lever: compile the model in place, for training and validation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slipstream.config import options

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
    return options(CompileOptions, {} if value is True else value, "compile")


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
    model._compiled_call_impl = _Guarded(model, model._compiled_call_impl, warn)


class _Guarded:
    """The compiled call of a module, until it fails to compile."""

    def __init__(self, model: nn.Module, compiled: Any, warn: Callable[[str], None]) -> None:
        self.model = model
        self.compiled = compiled
        self.warn = warn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.compiled(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            # Compilation fails before the code it concerns has run, so the call can be made again.
            self.model._compiled_call_impl = None
            self.warn(_message(self.model, error))
            return self.model._call_impl(*args, **kwargs)


def _message(model: nn.Module, error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    return (
        f"{type(model).__name__} cannot be compiled ({type(error).__name__}: {reason}); it runs eagerly. "
        "Mend what the message names, or leave compile out"
    )
