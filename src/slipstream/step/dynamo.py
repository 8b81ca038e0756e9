"""Dynamo settings and checks for capturing a step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from slipstream.step.verification import NotCapturedError, OnlyEagerError

__all__ = [
    "has_side_effects",
    "needs_autograd_engine",
    "refuse_checkpoint",
    "refuse_python_random",
    "refuse_uncompiled",
    "tracing",
    "why_not_recomputed",
]


def tracing() -> AbstractContextManager[Any]:
    """Return a context manager with Dynamo's settings for capturing a step."""
    settings: AbstractContextManager[Any] = torch._dynamo.config.patch(
        trace_autograd_ops=True,
        # Without this setting, a counter that a module increments in forward causes a new graph at every step.
        allow_unspec_int_on_nn_module=True,
        # Capture a new graph if hooks are added or removed later.
        skip_nnmodule_hook_guards=False,
        # Without this setting, NumPy's random numbers are drawn from torch's generator.
        use_numpy_random_stream=True,
    )
    return settings


def needs_autograd_engine() -> bool:
    """Return whether anomaly detection or saved-tensor hooks are active; a graph supports neither."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return torch.is_anomaly_enabled() or hooks is not None


def _translator() -> Any:
    """Return Dynamo's instruction translator for the current capture; call this function only from a backend."""
    return torch._dynamo.symbolic_convert.InstructionTranslator.current_tx()


def has_side_effects() -> bool:
    """Return whether Dynamo, after the graph has run, changes Python objects that the step did not create."""
    from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew

    effects = _translator().output.side_effects
    new = (AttributeMutationNew, ValueMutationNew)
    changed = filter(effects.is_modified, effects.id_to_variable.values())
    return bool(effects.tensor_hooks or effects.save_for_backward) or any(
        not isinstance(variable.mutation_type, new) for variable in changed
    )


def refuse_uncompiled() -> None:
    """Check, from inside the step, that Dynamo is tracing the step rather than skipping it.

    Raises:
        NotCapturedError: the step runs without compilation.
    """
    if not torch.compiler.is_dynamo_compiling():
        raise NotCapturedError(
            "torch.compile is disabled, or an active TorchDispatchMode does not support it; enable torch.compile, or "
            "exit the mode"
        )


def refuse_python_random() -> None:
    """Check that a step does not use Python's `random`, because the verification would also draw numbers from it.

    Raises:
        NotCapturedError: the step uses Python's random module.
        OnlyEagerError: the step uses a `random.Random` object.
    """
    output = _translator().output
    # Compare class names, because torch has two classes with this name, and their modules depend on the version.
    if any(type(value).__name__ == "RandomVariable" for value in output.side_effects.id_to_variable.values()):
        # Under Dynamo, such an object returns different numbers, even if only the model is compiled.
        raise OnlyEagerError("the step uses a random.Random object; use torch's random number generator")
    if output.random_calls:
        raise NotCapturedError("the step uses Python's random module; use torch's random number generator")


def why_not_recomputed() -> str | None:
    """Return the reason why torch does not recompute checkpointed activations in a step's graph, or None if it does."""
    # torch 2.11 does not recognize the nodes of `torch.autograd.grad`, and silently keeps all activations.
    if torch.__version__ >= "2.12":
        return None
    return "activation checkpointing in a step's graph requires torch 2.12 or newer, which recomputes activations there"


def refuse_checkpoint(graph: fx.GraphModule) -> None:
    """Check that a captured step contains no activation checkpoint that this version of torch ignores.

    Raises:
        NotCapturedError: the model calls `torch.utils.checkpoint`, and torch is older than 2.12.
    """
    if (reason := why_not_recomputed()) is None:
        return
    graphs = [module.graph for module in graph.modules() if isinstance(module, fx.GraphModule)]
    if any(
        node.target is torch.ops.higher_order.tag_activation_checkpoint for g in graphs for node in g.nodes
    ):
        raise NotCapturedError(reason)
