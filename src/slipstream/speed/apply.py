"""Apply the options of a plan to the model and the optimizer, in the required order."""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter, is_lazy

from slipstream.dist import is_distributed
from slipstream.errors import ConfigError, ModelError
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
from slipstream.optim.kernels import fuse
from slipstream.registry import MODEL_WRAPPERS
from slipstream.speed.activation_checkpointing import checkpoint_activations
from slipstream.speed.front_ends import is_plain_wrapper
from slipstream.speed.memory_format import check_cpu_kernels, to_channels_last
from slipstream.speed.plan import SpeedPlan
from slipstream.speed.precision import AUTOCAST_DTYPES, avoid_incorrect_kernels, convert_to_fp8, tf32
from slipstream.step.parts import StepPart

__all__ = ["overrides_train_step", "plan_optim", "prepare_model", "prepare_optim", "running", "to_device"]

_EXPANDABLE = "expandable_segments"


def prepare_model(model: nn.Module, plan: SpeedPlan, device: torch.device) -> nn.Module:
    """Return the model on its device with the plan's options applied, wrapped if there are several processes.

    Raises:
        ConfigError: the model is already wrapped, but an option requires the unwrapped model.
    """
    with plan.locating_errors():
        if isinstance(model, DistributedDataParallel | MMFullyShardedDataParallel):
            for option in ("sync_bn", "channels_last", "activation_checkpointing"):
                if getattr(plan, option):
                    kind = type(model).__name__
                    raise ConfigError(
                        f"the model is already wrapped in {kind}; pass the unwrapped model", option
                    )
            return to_device(model, device)
        if plan.sync_bn and is_distributed():
            model = convert_sync_batchnorm(model)
        model = to_device(model, device)
        if plan.precision == "fp8":
            convert_to_fp8(model)
        if plan.precision == "bf16" and device.type == "cpu":
            avoid_incorrect_kernels(model)
        if plan.channels_last:
            if device.type == "cpu":
                check_cpu_kernels(model)
            to_channels_last(model, weights=plan.parallel is None or not plan.parallel.sharded)
        if plan.activation_checkpointing is not None:
            checkpoint_activations(model, plan.activation_checkpointing)
    return _wrap(model, plan, device) if is_distributed() else model


def to_device(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model in place, and keep its Parameter objects, which optimizers and tied modules reference.

    On some devices, such as NPUs, `Module.to` replaces the Parameter objects, because a tensor on the
    device cannot be assigned to the `data` of a CPU tensor.

    Raises:
        ModelError: a parameter cannot be kept, because weak references or an autograd graph refer to it.
    """
    if torch._has_compatible_shallow_copy_type(torch.empty(0), torch.empty(0, device=device)):
        return model.to(device)  # keeps the Parameter objects
    for name, param in model.named_parameters():
        if param.device == device:
            continue
        grad, param.grad = param.grad, None
        moved = (
            UninitializedParameter(param.requires_grad, device=device)
            if is_lazy(param)
            else nn.Parameter(param.detach().to(device), param.requires_grad)
        )
        vars(moved).update(vars(param))  # the user's attributes, which swap_tensors also swaps
        try:
            torch.utils.swap_tensors(param, moved)
        except RuntimeError as error:
            raise ModelError(
                f"the parameter '{name}' cannot be moved to {device}, because other objects refer to it; move the "
                f"model with model.to('{device}') before you build the optimizer ({error})"
            ) from error
        param.grad = None if grad is None else grad.to(device)
    return model.to(device)


def _wrap(model: nn.Module, plan: SpeedPlan, device: torch.device) -> nn.Module:
    """Return the model, wrapped for multi-process training as specified by the plan."""
    # A model that overrides train_step calls its submodules directly, so each submodule is wrapped separately.
    default = MMSeparateDistributedDataParallel if overrides_train_step(model) else MMDistributedDataParallel
    cfg: dict[str, Any] = {"type": default, **(plan.parallel.wrapper if plan.parallel else {})}
    kind = cfg["type"]
    target = MODEL_WRAPPERS.resolve(kind) if isinstance(kind, str) else kind
    defaults: dict[str, Any] = {"module": model}
    known = issubclass(target, DistributedDataParallel | MMSeparateDistributedDataParallel)
    if known or "device_ids" in inspect.signature(target).parameters:
        defaults["device_ids"] = device_ids(device)
        defaults["broadcast_buffers"] = False
        defaults["find_unused_parameters"] = plan.find_unused_parameters
    with warnings.catch_warnings():
        # torch deprecates this argument of DDP, but its replacement still syncs buffers once, at the start.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        wrapped: nn.Module = MODEL_WRAPPERS.build(cfg, default_args=defaults)
    return wrapped


def overrides_train_step(model: nn.Module) -> bool:
    """Return whether the model overrides `train_step`, as GANs usually do."""
    standard = [
        kind.train_step for kind in (BaseModel, MMDistributedDataParallel, MMFullyShardedDataParallel)
    ]
    return getattr(type(model), "train_step", standard[0]) not in standard


def plan_optim(cfg: Any, plan: SpeedPlan, device: torch.device) -> Any:
    """Return the optimizer wrapper's configuration with the plan's precision, accumulation and clipping.

    Raises:
        ConfigError: `cfg` is an existing or custom wrapper whose settings differ from those of the plan.
    """
    if cfg is None:
        return None
    current = SpeedPlan.read(optim_wrapper=cfg, device=device.type)
    dtype = AUTOCAST_DTYPES.get(plan.precision or "fp32")
    wanted: dict[str, dict[str, Any]] = {
        "precision": {"type": "AmpOptimWrapper", "dtype": dtype} if dtype else {},
        "accumulate": {"accumulative_counts": plan.accumulate},
        "clip_grad": {"clip_grad": asdict(plan.clip_grad)} if plan.clip_grad else {},
    }
    options = [
        name for name, keys in wanted.items() if keys and getattr(plan, name) != getattr(current, name)
    ]
    changes = {key: value for option in options for key, value in wanted[option].items()}
    if changes and not is_plain_wrapper(cfg):
        kind = changes.pop("type", "its constructor")
        kwargs = ", ".join(f"{key}={value!r}" for key, value in changes.items())
        raise ConfigError(
            f"{plan.config_path(options[0])} cannot change an existing or custom optimizer wrapper; pass {kwargs} to "
            f"{kind}, or set optim_wrapper to a dict with the key 'optimizer' and without 'type'",
            "optim_wrapper",
        )
    return {**(cfg if isinstance(cfg, Mapping) else {"optimizer": cfg}), **changes} if changes else cfg


def prepare_optim(optim: OptimWrapper, model: nn.Module, plan: SpeedPlan, device: torch.device) -> None:
    """Select the kernels of the optimizer, and insert the step parts of the plan's options into `optim.parts`.

    The parts run first, in the order of the plan's fields: gradients are centralized, then clipped per unit, then
    clipped by `clip_grad`. With several optimizers, each has its own parts.

    Raises:
        ConfigError: an option does not support the model or the optimizer.
    """
    core = unwrap_model(model)
    for wrapper in optim.values() if isinstance(optim, OptimWrapperDict) else [optim]:
        parts: list[StepPart] = []
        with plan.locating_errors():
            if plan.fused is not False:
                fuse(wrapper.optimizer, plan.fused)
            for option in plan.options():
                make_part = getattr(getattr(plan, option), "part", None)
                if make_part is not None and (part := make_part(core, wrapper)) is not None:
                    _check_part(part, option, core, wrapper)
                    parts.append(part)
        replaced = set(map(type, parts))  # the parts of an earlier run with this wrapper
        wrapper.parts[:] = [*parts, *(part for part in wrapper.parts if type(part) not in replaced)]


def _check_part(part: StepPart, option: str, model: nn.Module, optim: OptimWrapper) -> None:
    """Raise a `ConfigError` if the wrapper ignores the part, or if the part does not support the model."""
    kind = type(optim)
    for method in ("update_params", "step"):
        if not getattr(kind, method).__module__.startswith("slipstream."):
            raise ConfigError(
                f"{kind.__name__}.{method} overrides OptimWrapper.{method}, which this option is a part of; use "
                "OptimWrapper, or remove this option",
                option,
            )
    if part.replaces_gradients and overrides_train_step(model):
        raise ConfigError(
            f"this option and {type(model).__name__}.train_step both compute the gradients; remove one of them",
            option,
        )
    changes_gradients = part.replaces_gradients or "before_update" in part.implements
    for name, module in model.named_modules() if changes_gradients else ():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(f"does not support sparse gradients; build '{name}' with sparse=False", option)


@contextmanager
def running(plan: SpeedPlan, device: torch.device, logger: logging.Logger | MMLogger) -> Iterator[None]:
    """Within the context, enable the plan's process-wide settings, and cache compiled code. Log what has no effect.

    cuDNN's benchmark mode is disabled if deterministic algorithms are enabled. Expandable segments reduce memory
    fragmentation; only new allocations are affected, and the other settings in PYTORCH_ALLOC_CONF are unchanged. When
    the context ends, graph breaks and recompiles are logged.
    """
    on_cuda = device.type == "cuda"
    for option, reason in plan.no_effect.items():
        logger.info(f"{plan.sources[option]} has no effect here: {reason}")
    with ExitStack() as stack:
        if on_cuda and plan.precision == "tf32":
            stack.enter_context(tf32())
        if plan.cudnn_benchmark:
            cudnn = torch.backends.cudnn
            stack.callback(setattr, cudnn, "benchmark", cudnn.benchmark)
            cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
        if plan.expandable_segments and on_cuda:
            get = getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # since torch 2.12
            before = os.environ.get("PYTORCH_ALLOC_CONF", "") if get is None else str(get())
            # Pass all settings, because torch resets some omitted settings to their defaults. The last value of a
            # setting takes precedence.
            change, own = torch._C._accelerator_setAllocatorSettings, f"{before}," if before else ""
            stack.callback(change, before if _EXPANDABLE in before else f"{own}{_EXPANDABLE}:False")
            change(f"{own}{_EXPANDABLE}:True")
        if plan.compile is not None:
            # Imported here, because most runs do not compile.
            from slipstream.speed.compile_cache import use_cache
            from slipstream.speed.compile_report import CompileReport

            is_inductor = plan.compile.backend == "inductor"
            folder = use_cache(plan.compile.cache if is_inductor else False, logger.warning)
            cached = f", whose code is cached in {folder}" if folder else ""
            logger.info(
                f"torch.compile: training waits for each compilation{cached}; the first one may take minutes"
            )
            stack.callback(CompileReport().log, logger)
            # A batch may have several backward passes through a compiled model, with retain_graph=True.
            stack.enter_context(torch._functorch.config.patch(donated_buffer=False))
        yield
