"""Build the training step: a single graph, or the eager step with or without a compiled model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from slipstream.errors import ConfigError
from slipstream.logging import PhaseTimes
from slipstream.model.wrappers import MMDistributedDataParallel, unwrap_model
from slipstream.optim import OptimWrapper
from slipstream.speed.compile import Backend
from slipstream.speed.plan import SpeedPlan
from slipstream.step import CompiledStep, EagerStep, Step

__all__ = ["ModelLosses", "StepSpec", "build_step", "compiled_scope"]

# Type of `losses(module, inputs)`, which returns the loss to minimize and the values to log.
ModelLosses = Callable[[nn.Module, Any], tuple[Tensor, dict[str, Tensor]]]


class StepSpec(NamedTuple):
    """The components of a training step: the model, the optimizer, and the functions for data and losses.

    Args:
        model: the model, wrapped (for example in DDP) if there are several processes.
        optim: the optimizer wrapper.
        losses: `losses(module, inputs)` calls `module` (`model` or the unwrapped model), and returns the loss to
            minimize and the values to log.
        prepare: moves a batch to the device and converts it to the inputs of `losses`.
        phases: measures the host time of each phase, if set.
    """

    model: nn.Module
    optim: OptimWrapper
    losses: ModelLosses
    prepare: Callable[[Any], Any]
    phases: PhaseTimes | None = None


def build_step(
    spec: StepSpec, plan: SpeedPlan, warn: Callable[[str], None], info: Callable[[str], None] = lambda _: None
) -> Step:
    """Return the step for a plan. If `compile` is enabled without a `scope`, the step is a single graph if possible.

    Args:
        spec: the model, the optimizer and the losses.
        plan: the options, which determine the compilation scope and whether to use a CUDA graph.
        warn: called with a message if the step cannot be compiled as requested.
        info: called with messages about the compiled step, for example when it replaces the eager step.

    Raises:
        ConfigError: scope 'step' is set explicitly, but the step cannot be compiled as one graph.
    """
    model, optim, options = spec.model, spec.optim, plan.compile
    losses = partial(spec.losses, model)
    if isinstance(model, MMDistributedDataParallel):
        losses = partial(model.call_model, spec.losses)
    eager = EagerStep(losses, model, optim, spec.prepare, spec.phases)
    if options is None:
        return eager
    # Imported here, because most runs do not compile.
    from slipstream.speed.compiled_modules import compile_model
    from slipstream.speed.graph_step import build_graph_step, why_not_one_graph

    core = unwrap_model(model)
    if options.scope in (None, "step") and Backend(options, core).problem is None:
        reason = why_not_one_graph(model, optim)
        if reason is None:
            return build_graph_step(spec, eager, plan, warn, info)
        if options.scope == "step":
            raise ConfigError(
                f"the step cannot be compiled as one graph: {reason}. Use scope='model'", "compile.scope"
            )
        warn(f"The step cannot be compiled as one graph: {reason}. Only the model is compiled")
    compile_model(core, options, warn, optim, info)
    return eager


def compiled_scope(step: Step, model: nn.Module) -> str | None:
    """Return the scope of the compiled code: 'step' (even before its graph is ready), 'model' or 'block'.

    Returns None if nothing is compiled.
    """
    if isinstance(step, CompiledStep) and step.uses_graph:
        return "step"
    core = unwrap_model(model)
    compiled = [module for module in core.modules() if module._compiled_call_impl is not None]
    if not compiled:
        return None
    return "model" if compiled == [core] else "block"
