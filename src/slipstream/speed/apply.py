"""Put the options of a plan to work, in the order in which they build on each other."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from types import CodeType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slipstream.dist import is_distributed
from slipstream.errors import ConfigError
from slipstream.logging import MMLogger
from slipstream.model import (
    BaseModel,
    MMDistributedDataParallel,
    MMSeparateDistributedDataParallel,
    convert_sync_batchnorm,
    unwrap_model,
)
from slipstream.model.wrappers import MMFullyShardedDataParallel, device_ids
from slipstream.optim import OptimWrapper, OptimWrapperDict
from slipstream.registry import MODEL_WRAPPERS
from slipstream.speed.activation_checkpointing import checkpoint_activations
from slipstream.speed.compile import compiled_blocks
from slipstream.speed.compile_cache import use_cache
from slipstream.speed.compile_report import CompileReport
from slipstream.speed.front_ends import is_plain_wrapper
from slipstream.speed.fused import fuse
from slipstream.speed.memory_format import to_channels_last
from slipstream.speed.plan import SpeedPlan
from slipstream.speed.precision import convert_to_fp8, tf32
from slipstream.speed.process import process_switches
from slipstream.step.parts import StepPart

__all__ = [
    "add_parts",
    "compiling",
    "fuse_optim",
    "overrides_train_step",
    "plan_optim",
    "prepare_model",
    "switches",
    "wrap_model",
]


def prepare_model(model: nn.Module, plan: SpeedPlan, device: torch.device) -> nn.Module:
    """Return the model on its device with the plan's options in it; what comes later works on what came before.

    Raises:
        ConfigError: the model comes wrapped for several processes, too late for an option inside of it.
    """
    if isinstance(model, DistributedDataParallel | MMFullyShardedDataParallel):
        _refuse_wrapped(model, plan)
        return model.to(device)
    if plan.sync_bn and is_distributed():
        model = convert_sync_batchnorm(model)
    model = model.to(device)
    if plan.precision is not None and plan.precision.name == "fp8":
        with _placing(plan, "precision"):
            convert_to_fp8(model)
    if plan.channels_last:
        to_channels_last(model, weights=plan.parallel is None or not plan.parallel.sharded)
    if plan.activation_checkpointing is not None:
        with _placing(plan, "activation_checkpointing"):
            checkpoint_activations(model, plan.activation_checkpointing)
    return wrap_model(model, plan, device) if is_distributed() else model


def _refuse_wrapped(model: nn.Module, plan: SpeedPlan) -> None:
    for option in ("sync_bn", "channels_last", "activation_checkpointing"):
        if getattr(plan, option):
            raise ConfigError(
                f"the model comes wrapped in {type(model).__name__}, too late for this option: give the model itself",
                plan.place(option),
            )


def wrap_model(model: nn.Module, plan: SpeedPlan, device: torch.device) -> nn.Module:
    """Return the model wrapped for several processes as the plan says."""
    # A model that trains its parts itself calls them, not the wrapper around the whole: each part syncs its own.
    default = MMSeparateDistributedDataParallel if overrides_train_step(model) else MMDistributedDataParallel
    cfg: dict[str, Any] = {"type": default, **(plan.parallel.wrapper if plan.parallel else {})}
    kind = cfg["type"]
    target = MODEL_WRAPPERS.resolve(kind) if isinstance(kind, str) else kind
    # Whatever the configuration gives, the others keep their defaults.
    defaults: dict[str, Any] = {"module": model}
    ours = issubclass(target, DistributedDataParallel | MMSeparateDistributedDataParallel)
    if ours or "device_ids" in inspect.signature(target).parameters:
        defaults["device_ids"] = device_ids(device)
        defaults["broadcast_buffers"] = False
        defaults["find_unused_parameters"] = plan.find_unused_parameters
    with warnings.catch_warnings():
        # Of torch's own class: its successor still syncs buffers once, at the start.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        wrapped: nn.Module = MODEL_WRAPPERS.build(cfg, default_args=defaults)
    return wrapped


def overrides_train_step(model: nn.Module) -> bool:
    """Say whether a model trains itself, as GANs do, by a `train_step` of its own."""
    wrappers = (MMDistributedDataParallel.train_step, MMFullyShardedDataParallel.train_step)
    standard = (BaseModel.train_step, *wrappers)
    return getattr(type(model), "train_step", standard[0]) not in standard


def plan_optim(cfg: Any, plan: SpeedPlan, device: torch.device) -> Any:
    """Return the configuration of the optimizer wrapper, if any, with the plan's precision, accumulation and clipping.

    Raises:
        ConfigError: the plan says something that a ready wrapper, or one of another class, does not do.
    """
    if cfg is None:
        return None
    own = SpeedPlan.read(optim_wrapper=cfg, device=device.type)
    options = [option for option in _WRAPPER_OPTIONS if getattr(plan, option) != getattr(own, option)]
    words = {word: value for option in options for word, value in _WRAPPER_OPTIONS[option](plan).items()}
    if not words:
        return cfg
    if not is_plain_wrapper(cfg):
        said = ", ".join(f"{word}={value!r}" for word, value in words.items())
        raise ConfigError(
            f"{plan.place(options[0])} cannot change an optimizer wrapper that is made already or is not ours: give it "
            f"{said} where it is made, or let optim_wrapper be a dict with an 'optimizer'",
            "optim_wrapper",
        )
    return {**(cfg if isinstance(cfg, Mapping) else {"optimizer": cfg}), **words}


def _precision_words(plan: SpeedPlan) -> dict[str, Any]:
    dtype = plan.precision.autocast_dtype if plan.precision else None
    if dtype is None:
        return {}
    return {"type": "AmpOptimWrapper", "dtype": str(dtype).removeprefix("torch.")}


_WRAPPER_OPTIONS: Mapping[str, Callable[[SpeedPlan], dict[str, Any]]] = {
    "precision": _precision_words,
    "accumulate": lambda plan: {"accumulative_counts": plan.accumulate},
    "clip_grad": lambda plan: {"clip_grad": asdict(plan.clip_grad)} if plan.clip_grad else {},
}


def fuse_optim(optim: OptimWrapper, plan: SpeedPlan) -> None:
    """Let the optimizer, or each of several, run fused kernels as the plan says."""
    if plan.fused is False:
        return
    parts = optim.values() if isinstance(optim, OptimWrapperDict) else [optim]
    for part in parts:
        with _placing(plan, "fused"):
            fuse(part.optimizer, plan.fused)


@runtime_checkable
class _MakesPart(Protocol):
    """The options of a speed option that is a part of the step."""

    def part(self, model: nn.Module, optim: OptimWrapper) -> StepPart:
        """Return the part; `model` is not wrapped, `optim` is the wrapper that it will work in."""


def add_parts(plan: SpeedPlan, model: nn.Module, optim: OptimWrapper) -> None:
    """Put the parts that the plan's options make before those in `optim.parts`, in the order of the plan's fields.

    So gradients are centralized, clipped by unit, and then clipped by `clip_grad`. Of several optimizers each gets
    parts of its own. A part replaces one of the same class, so a second call changes nothing.

    Raises:
        ConfigError: an option does not fit the model or the optimizer.
    """
    core = unwrap_model(model)
    made = {option: how for option in plan.options() if isinstance(how := getattr(plan, option), _MakesPart)}
    for wrapper in optim.values() if isinstance(optim, OptimWrapperDict) else [optim]:
        parts = []
        for option, how in made.items():
            with _placing(plan, option):
                part = how.part(core, wrapper)
                _check_part(part, option, core, wrapper)
            parts.append(part)
        replaced = {type(part) for part in parts}
        wrapper.parts[:] = [*parts, *(part for part in wrapper.parts if type(part) not in replaced)]


def _check_part(part: StepPart, option: str, model: nn.Module, optim: OptimWrapper) -> None:
    """Refuse a part that would be ignored, or that the model's gradients do not suit."""
    if (method := _ignores_parts(type(optim))) is not None:
        raise ConfigError(
            f"{type(optim).__name__}.{method} overrides OptimWrapper.{method} without calling it, so this option would "
            f"have no effect: call super().{method}() there, or use OptimWrapper",
            option,
        )
    if part.replaces_gradients and overrides_train_step(model):
        raise ConfigError(
            f"computes the gradients itself, and {type(model).__name__}.train_step does so, too: remove one of them",
            option,
        )
    if type(part).before_update is StepPart.before_update and not part.replaces_gradients:
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(f"'{name}' has sparse gradients: build it with sparse=False", option)


def _ignores_parts(kind: type[OptimWrapper]) -> str | None:
    """Return the name of a method that replaces one of `OptimWrapper`'s, by which the parts run, and never calls it."""
    for method in ("update_params", "update", "step"):
        for owner in kind.__mro__:
            own = vars(owner).get(method)
            if owner.__module__.startswith("slipstream.") and own is not None:
                break
            code = getattr(inspect.unwrap(own), "__code__", None) if own is not None else None
            if code is None:
                continue
            names = _names(code)
            if "_apply_parts" in names or (
                method in names and any(b.__name__ in names for b in owner.__mro__[1:])
            ):
                break
            if not {"super", method} <= names:
                return method
    return None


def _names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in a function and in those inside it."""
    inner = (_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*inner)


@contextmanager
def switches(plan: SpeedPlan, device: torch.device, warn: Callable[[str], None]) -> Iterator[None]:
    """Have the plan's switches of the whole process on, as far as they concern the device, while this lasts."""
    on_cuda = device.type == "cuda"
    with ExitStack() as stack:
        if on_cuda and plan.precision is not None and plan.precision.name == "tf32":
            stack.enter_context(tf32())
        expandable = plan.expandable_segments and on_cuda
        stack.enter_context(process_switches(plan.cudnn_benchmark, expandable, warn))
        yield


@contextmanager
def _placing(plan: SpeedPlan, option: str) -> Iterator[None]:
    """Place an error of an option where the option was set."""
    try:
        yield
    except ConfigError as error:
        error.path = plan.place(option) + error.path.removeprefix(option)
        raise


@contextmanager
def compiling(plan: SpeedPlan, model: nn.Module, logger: logging.Logger | MMLogger) -> Iterator[None]:
    """Keep what is compiled inside for the next start, and log at the end what broke, was recompiled or skipped."""
    if plan.compile is None:
        yield
        return
    core = unwrap_model(model)
    use_cache(core, plan.compile, plan, logger.warning)
    blocks = compiled_blocks(core, plan.compile) if plan.compile.scope == "block" else []
    report = CompileReport(max(1, len({repr(block) for block in blocks})))
    report.start()
    logger.info("torch.compile: the compilation of each kind of step may take minutes")
    try:
        yield
    finally:  # the report listens to torch's compilations until then
        summary = report.finish()
    (logger.warning if summary.troubled else logger.info)(summary.text())
