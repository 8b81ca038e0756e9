"""Build the training step that is compiled as one graph. This module is imported only if a step is compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slipstream.dist import get_world_size
from slipstream.model.wrappers import MMDistributedDataParallel, unwrap_model
from slipstream.model.wrappers.distributed import HalfPrecision, run_comm_hook
from slipstream.optim import OptimWrapper, OptimWrapperDict
from slipstream.speed.activation_checkpointing import is_recomputed
from slipstream.speed.compile import Backend, CompileOptions
from slipstream.speed.compile_report import explain_failure, failed_line
from slipstream.speed.compiled_modules import compile_model
from slipstream.speed.inductor import OVERLAP_OPTIONS
from slipstream.speed.small_steps import compile_step
from slipstream.step import EagerStep
from slipstream.step.cuda_graph import CudaCapture, CudaGraphs
from slipstream.step.dynamo import why_not_recomputed
from slipstream.step.graph import GraphStep
from slipstream.step.sync import GradientSync
from slipstream.step.verification import NotCapturedError, OnlyEagerError, WrongNumbersError

if TYPE_CHECKING:
    from slipstream.speed.plan import SpeedPlan
    from slipstream.speed.steps import StepSpec

__all__ = ["build_graph_step", "why_not_one_graph"]


def why_not_one_graph(model: nn.Module, optim: OptimWrapper) -> str | None:
    """Return the reason why the whole step cannot be compiled as one graph, or None if it can."""
    if isinstance(optim, OptimWrapperDict):
        return "there are several optimizers"
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            return f"'{name}' has sparse gradients, which torch.compile does not support"
    if any(map(is_recomputed, model.modules())):
        if (reason := why_not_recomputed()) is not None:
            return reason
        if any(part.replaces_gradients for part in optim.parts):
            return "activation_checkpointing in a graph supports only one backward pass, but sam runs two"
    if model is unwrap_model(model):
        return None
    if not isinstance(model, MMDistributedDataParallel):
        return f"{type(model).__name__} performs its own communication"
    if model.find_unused_parameters:
        return "find_unused_parameters searches the autograd graph in each step"
    if any(hook is not run_comm_hook for hook, _ in model._comm_hooks):
        return "a communication hook is registered, which a graph does not call"
    return None


def build_graph_step(
    spec: StepSpec,
    eager: EagerStep,
    plan: SpeedPlan,
    warn: Callable[[str], None],
    info: Callable[[str], None],
) -> GraphStep:
    """Return the compiled step.

    Args:
        spec: the model, the optimizer and the losses.
        eager: the eager step.
        plan: the options.
        warn: called with a message if the step cannot be compiled.
        info: called with messages about the compiled step.
    """
    options, core = plan.compile, unwrap_model(spec.model)
    assert options is not None
    backend, uses_cuda_graph = Backend(options, core), plan.cuda_graph
    if options.backend == "inductor":
        backend.settings |= {} if get_world_size() == 1 else {**OVERLAP_OPTIONS, **(options.options or {})}
        # One CUDA graph of the whole step replaces inductor's CUDA graphs.
        uses_cuda_graph = bool(backend.settings.pop("triton.cudagraphs", False)) or uses_cuda_graph
    uses_cuda_graph = uses_cuda_graph and torch.cuda.is_available()
    compile_model(core, options, warn)
    if core._compiled_call_impl is not None:
        core._compiled_call_impl = _in_evaluation(core, core._compiled_call_impl)

    def recover(error: Exception) -> None:
        core._compiled_call_impl = None
        message, compiles_model = _describe_failure(error, options)
        warn(message)
        if compiles_model:
            compile_model(core, options, warn, spec.optim, info)

    return GraphStep(
        loss_of=partial(spec.losses, core),
        model=core,
        optim=spec.optim,
        eager=eager,
        backend=partial(compile_step, backend, info) if options.backend == "inductor" else backend,
        recover=recover,
        sync=_sync(spec.model),
        verify=options.verify,
        # A CUDA graph supports only one shape.
        dynamic=False if uses_cuda_graph and options.dynamic is None else options.dynamic,
        cuda_graphs=(lambda: CudaGraphs(CudaCapture(), warn)) if uses_cuda_graph else None,
        info=info,
    )


def _describe_failure(error: Exception, options: CompileOptions) -> tuple[str, bool]:
    """Return a warning with the reason why the graph of the step failed, and whether the model can be compiled."""
    if isinstance(error, WrongNumbersError) and error.compiler:
        return (
            f"The step compiled by backend {options.backend!r} computes different gradients or updates than torch's "
            f"eager operators ({error}). This is most likely a compiler bug. Training continues eagerly"
        ), False
    if isinstance(error, WrongNumbersError):
        return (
            f"The captured step and the eager step compute different results ({error}). Likely causes are hooks, "
            "random numbers that are not generated by torch, state outside modules, an active TorchFunctionMode, and "
            "BatchNorm in a checkpointed block (recomputation updates its statistics a second time). Training "
            "continues eagerly"
        ), False
    if isinstance(reason := NotCapturedError.find_in(error), OnlyEagerError):
        return f"The step is not compiled: {explain_failure(reason)}. Training continues eagerly", False
    remedy = "To compile the step, change this line of code. " if failed_line(error) else ""
    return (
        f"The step cannot be compiled as one graph ({explain_failure(error)}). Only the model is compiled. "
        f"{remedy}To suppress this warning, set compile=dict(scope='model')"
    ), True


def _sync(model: nn.Module) -> GradientSync | None:
    if get_world_size() == 1 or not isinstance(model, DistributedDataParallel):
        return None
    hook = getattr(model, "comm_hook", None)
    return GradientSync(get_world_size(), hook.dtype if isinstance(hook, HalfPrecision) else None)


def _in_evaluation(model: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the compiled code only in evaluation, because training uses the step's graph."""

    def call(*args: Any, **kwargs: Any) -> Any:
        # In an eager step, a loss may also call the model in training mode without gradients.
        trains = torch.is_grad_enabled() or model.training
        return (model._call_impl if trains else compiled)(*args, **kwargs)

    return call
