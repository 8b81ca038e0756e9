"""What a compiled step asks of Dynamo while it is being captured."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from slipstream.step.verification import NotCapturedError, OnlyEagerError

__all__ = ["has_side_effects", "refuse_python_random", "tracing"]


def tracing() -> AbstractContextManager[Any]:
    """Return the settings of torch with which a step is captured, if it is."""
    settings: AbstractContextManager[Any] = torch._dynamo.config.patch(
        trace_autograd_ops=True,
        # A number that a module counts up in forward would otherwise mean a new graph at every step.
        allow_unspec_int_on_nn_module=True,
        # Hooks that are added or removed later mean a new graph.
        skip_nnmodule_hook_guards=False,
        # NumPy's random numbers would otherwise be drawn from torch's generator.
        use_numpy_random_stream=True,
    )
    return settings


def _translator() -> Any:
    """Return what captures a step, for its backend to ask."""
    return torch._dynamo.symbolic_convert.InstructionTranslator.current_tx()


def has_side_effects() -> bool:
    """Say whether Dynamo changes Python objects after the graph, other than those that the step itself makes."""
    from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew

    effects = _translator().output.side_effects
    new = (AttributeMutationNew, ValueMutationNew)
    changed = filter(effects.is_modified, effects.id_to_variable.values())
    return bool(effects.tensor_hooks or effects.save_for_backward) or any(
        not isinstance(variable.mutation_type, new) for variable in changed
    )


def refuse_python_random() -> None:
    """Refuse a step that draws from Python's `random`: the draws of a batch that is only verified would be lost.

    Raises:
        NotCapturedError: it does.
    """
    output = _translator().output
    # By name: torch has two classes of it, in modules that move.
    if any(type(value).__name__ == "RandomVariable" for value in output.side_effects.id_to_variable.values()):
        # Also when it compiles the model alone, Dynamo draws other numbers from such an object.
        raise OnlyEagerError("it draws from a random.Random: use torch's random numbers")
    if output.random_calls:
        raise NotCapturedError("it draws from Python's random module: use torch's random numbers")
