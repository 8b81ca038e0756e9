"""Which step trains a model: one graph, a compiled model in the eager step, or the eager step."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from slipstream.dist import get_world_size
from slipstream.errors import ConfigError
from slipstream.model.wrappers import MMDistributedDataParallel, unwrap_model
from slipstream.model.wrappers.comm_hooks import HalfPrecision
from slipstream.optim import OptimWrapper, OptimWrapperDict
from slipstream.speed.compile import CompileOptions, backend_options, compile_model
from slipstream.speed.compile_cache import folder_now
from slipstream.speed.compile_report import explain_failure
from slipstream.speed.plan import SpeedPlan
from slipstream.step import EagerStep, Step
from slipstream.step.background import BackgroundCompiler, can_fork
from slipstream.step.cuda_graph import CudaCapture, RecordedCalls
from slipstream.step.eager import Losses
from slipstream.step.graph import GraphStep
from slipstream.step.sync import GradientSync
from slipstream.step.verification import NotCapturedError, OnlyEagerError, WrongNumbersError

__all__ = ["Training", "build_step", "why_not_one_graph"]


@dataclass(frozen=True)
class Training:
    """What is trained, however it is done.

    Args:
        model: the model, in a wrapper for several processes if there are several.
        optim: moves its weights.
        losses: `losses(module, inputs)` calls `module`, which is `model` or the bare model in it.
        prepare: brings a batch to the device and to what `losses` wants.
        reduce: turns losses into the one to minimise and the values to log.
    """

    model: nn.Module
    optim: OptimWrapper
    losses: Callable[[nn.Module, Any], Losses]
    prepare: Callable[[Any], Any]
    reduce: Callable[[Losses], tuple[Tensor, dict[str, Tensor]]] | None = None


def build_step(
    training: Training,
    plan: SpeedPlan,
    warn: Callable[[str], None],
    say: Callable[[str], None] = lambda _: None,
) -> Step:
    """Return the step that the plan asks for; with no `scope` named, the widest that works.

    Args:
        training: what is trained.
        plan: what is compiled, if anything, and whether it is replayed as a CUDA graph.
        warn: is told, once, if the step cannot be what was asked for.
        say: is told when the compiled step takes over from the eager one.

    Raises:
        ConfigError: scope 'step' was asked for by name, and this training cannot be one graph.
    """
    model, optim, how = training.model, training.optim, plan.compile

    def forward(batch: Any) -> Losses:
        return training.losses(model, training.prepare(batch))

    eager = EagerStep(forward, model, optim, training.reduce)
    if how is None:
        return eager
    core = unwrap_model(model)
    if how.scope in (None, "step"):
        reason = why_not_one_graph(model, optim)
        if reason is None:
            return _one_graph(training, core, how, warn, say, plan.cuda_graph)
        if how.scope == "step":
            raise ConfigError(f"the step cannot be one graph: {reason}. Take scope 'model'", "compile.scope")
        warn(f"The step is not one graph, but the model is compiled: {reason}")
    compile_model(core, how, warn)
    return eager


def why_not_one_graph(model: nn.Module, optim: OptimWrapper) -> str | None:
    """Return why the whole step cannot be one graph, or None."""
    if isinstance(optim, OptimWrapperDict):
        return "there are several optimizers"
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            return f"'{name}' has sparse gradients, which torch.compile does not support"
    if model is unwrap_model(model):
        return None
    if not isinstance(model, MMDistributedDataParallel):
        return f"{type(model).__name__} does its communication itself"
    if model.find_unused_parameters:
        return "find_unused_parameters looks for them in each step"
    if not isinstance(model.comm_hook, HalfPrecision | None):
        return f"the communication hook {type(model.comm_hook).__name__} keeps a state of its own"
    return None


def _one_graph(
    training: Training,
    core: nn.Module,
    how: CompileOptions,
    warn: Callable[[str], None],
    say: Callable[[str], None],
    cuda_graph: bool,
) -> GraphStep:
    optim = training.optim
    eager = EagerStep(partial(training.losses, training.model), training.model, optim, training.reduce)

    def recover(error: Exception) -> EagerStep:
        core._compiled_call_impl = None
        if isinstance(error, WrongNumbersError):
            warn(_wrong_numbers(error, how))
        elif isinstance(reason := NotCapturedError.inside(error), OnlyEagerError):
            warn(f"The step is not compiled: {explain_failure(reason)}. Training continues eagerly")
        else:
            warn(
                f"The step cannot be one graph ({explain_failure(error)}). The model alone is compiled instead: change "
                "the line above, or set compile=dict(scope='model')"
            )
            compile_model(core, how, warn, tells_limit=False)  # what varies has been reported
        return eager

    compile_model(core, how, warn)
    if (compiled := core._compiled_call_impl) is not None:
        core._compiled_call_impl = _OnlyEvaluation(core, compiled)
    device_type = next(core.parameters()).device.type
    backend, replays = _backend(how, device_type, cuda_graph)
    in_background = not how.wait and how.backend == "inductor" and can_fork(device_type)
    return GraphStep(
        loss_of=partial(training.losses, core),
        prepare=training.prepare,
        model=core,
        optim=optim,
        eager=eager,
        backend=backend,
        recover=recover,
        reduce=training.reduce,
        sync=_sync(training.model),
        verify=how.verify,
        # A CUDA graph has one shape.
        dynamic=False if replays and how.dynamic is None else how.dynamic,
        record=(lambda: RecordedCalls(CudaCapture(), warn)) if replays else None,
        background=BackgroundCompiler() if in_background else None,
        say=say,
    )


def _wrong_numbers(error: WrongNumbersError, how: CompileOptions) -> str:
    if error.compiler:
        return (
            f"The code that the backend {how.backend!r} made of the step computes other gradients or updates than "
            f"torch's own operators ({error}): most likely a defect of the compiler. Training continues eagerly"
        )
    return (
        f"The captured step lacks something that the eager step does ({error}). Likely causes are hooks, random "
        "numbers that are not torch's, state outside of modules, and BatchNorm in a checkpoint, which is counted twice "
        "when it is computed again. Training continues eagerly"
    )


def _sync(model: nn.Module) -> GradientSync | None:
    if get_world_size() == 1 or not isinstance(model, DistributedDataParallel):
        return None
    hook = getattr(model, "comm_hook", None)
    return GradientSync(get_world_size(), hook.dtype if isinstance(hook, HalfPrecision) else None)


def _backend(how: CompileOptions, device_type: str, cuda_graph: bool) -> tuple[Callable[..., Any], bool]:
    """Return the compiler of a captured step, and whether its code is replayed as a CUDA graph."""
    options = backend_options(how)
    if how.backend == "inductor":
        from slipstream.speed.inductor_options import inductor_options  # imports Dynamo, which takes seconds

        options = inductor_options(device_type) | options
        if get_world_size() > 1:
            from slipstream.speed.overlap import OVERLAP

            options = OVERLAP | options
        # The whole step is replayed instead, with its optimizer state.
        cuda_graph = bool(options.pop("triton.cudagraphs", False)) or cuda_graph

    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")

    def compiled(graph: Any, inputs: Any) -> Callable[..., Any]:
        if how.backend == "inductor":
            from torch._inductor.compile_fx import compile_fx

            with folder_now(folder):
                made = compile_fx(graph, inputs, config_patches=options)
            # Torch keeps Dynamo out of the code by a wrapper; whoever calls the code here does so, too.
            return cast("Callable[..., Any]", getattr(made, "_torchdynamo_orig_callable", made))
        chosen = how.backend if callable(how.backend) else torch._dynamo.lookup_backend(how.backend)
        given = {name: value for name, value in {"mode": how.mode, "options": options}.items() if value}
        run: Callable[..., Any] = chosen(graph, inputs, **given)
        return run

    return compiled, cuda_graph and torch.cuda.is_available()


class _OnlyEvaluation:
    """A compiled model for validation, whose training is part of a larger graph."""

    def __init__(self, model: nn.Module, compiled: Callable[..., Any]) -> None:
        self.model, self.compiled = model, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A loss may call the model in training mode without gradients, inside an eager step.
        if torch.is_grad_enabled() or self.model.training:
            return self.model._call_impl(*args, **kwargs)
        return self.compiled(*args, **kwargs)
