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
from slipstream.speed.compile import CompileOptions, backend_options, compile_model
from slipstream.speed.compile_report import explain_failure, failed_line
from slipstream.step import EagerStep
from slipstream.step.cuda_graph import CudaCapture, CudaGraphs
from slipstream.step.dynamo import why_not_recomputed
from slipstream.step.graph import GraphStep
from slipstream.step.sync import GradientSync
from slipstream.step.verification import NotCapturedError, OnlyEagerError, WrongNumbersError

if TYPE_CHECKING:
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
    core: nn.Module,
    options: CompileOptions,
    warn: Callable[[str], None],
    info: Callable[[str], None],
    cuda_graph: bool,
) -> GraphStep:
    """Return the compiled step.

    Args:
        spec: the model, the optimizer and the losses.
        eager: the eager step.
        core: the unwrapped model.
        options: the options of `compile`.
        warn: called with a message if the step cannot be compiled.
        info: called with messages about the compiled step.
        cuda_graph: whether to use a CUDA graph.
    """

    device_type = next(core.parameters()).device.type
    backend, uses_cuda_graph = _backend(options, device_type, cuda_graph)
    compile_model(core, options, warn)
    if core._compiled_call_impl is not None:
        core._compiled_call_impl = _EvaluationOnly(core, core._compiled_call_impl)
    return GraphStep(
        loss_of=partial(spec.losses, core),
        model=core,
        optim=spec.optim,
        eager=eager,
        backend=backend,
        recover=partial(_compile_less, spec, core, options, warn, info),
        sync=_sync(spec.model),
        verify=options.verify,
        # A CUDA graph supports only one shape.
        dynamic=False if uses_cuda_graph and options.dynamic is None else options.dynamic,
        cuda_graphs=(lambda: CudaGraphs(CudaCapture(), warn)) if uses_cuda_graph else None,
        info=info,
    )


def _compile_less(
    spec: StepSpec,
    core: nn.Module,
    options: CompileOptions,
    warn: Callable[[str], None],
    info: Callable[[str], None],
    error: Exception,
) -> None:
    """After the graph of the step has failed, compile only the model, or nothing, and warn with the reason."""
    core._compiled_call_impl = None
    if isinstance(error, WrongNumbersError):
        warn(_wrong_numbers(error, options))
    elif isinstance(reason := NotCapturedError.find_in(error), OnlyEagerError):
        warn(f"The step is not compiled: {explain_failure(reason)}. Training continues eagerly")
    else:
        remedy = "To compile the step, change this line of code. " if failed_line(error) else ""
        warn(
            f"The step cannot be compiled as one graph ({explain_failure(error)}). Only the model is compiled. "
            f"{remedy}To suppress this warning, set compile=dict(scope='model')"
        )
        compile_model(core, options, warn, spec.optim, info)


def _wrong_numbers(error: WrongNumbersError, options: CompileOptions) -> str:
    if error.compiler:
        return (
            f"The step compiled by backend {options.backend!r} computes different gradients or updates than torch's "
            f"eager operators ({error}). This is most likely a compiler bug. Training continues eagerly"
        )
    return (
        f"The captured step and the eager step compute different results ({error}). Likely causes are hooks, random "
        "numbers that are not generated by torch, state outside modules, an active TorchFunctionMode, and BatchNorm in "
        "a checkpointed block (recomputation updates its statistics a second time). Training continues eagerly"
    )


def _sync(model: nn.Module) -> GradientSync | None:
    if get_world_size() == 1 or not isinstance(model, DistributedDataParallel):
        return None
    hook = getattr(model, "comm_hook", None)
    return GradientSync(get_world_size(), hook.dtype if isinstance(hook, HalfPrecision) else None)


def _backend(options: CompileOptions, device_type: str, cuda_graph: bool) -> tuple[Callable[..., Any], bool]:
    """Return the compiler for a captured step, and whether the compiled code runs as a CUDA graph."""
    from slipstream.speed.inductor import OVERLAP_OPTIONS, backend_of  # imports Dynamo, which takes seconds

    settings = backend_options(options)
    if options.backend == "inductor":
        settings = (OVERLAP_OPTIONS if get_world_size() > 1 else {}) | settings
        # One CUDA graph of the whole step replaces inductor's CUDA graphs.
        cuda_graph = bool(settings.pop("triton.cudagraphs", False)) or cuda_graph
    return backend_of(options, settings, device_type), cuda_graph and torch.cuda.is_available()


class _EvaluationOnly:
    """Calls a model's compiled code only in evaluation, because training uses the step's graph."""

    def __init__(self, model: nn.Module, compiled: Callable[..., Any]) -> None:
        self.model, self.compiled = model, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # In an eager step, a loss may also call the model in training mode without gradients.
        if torch.is_grad_enabled() or self.model.training:
            return self.model._call_impl(*args, **kwargs)
        return self.compiled(*args, **kwargs)
