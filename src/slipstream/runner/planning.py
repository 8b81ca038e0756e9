"""Read a Runner's speed plan, complete it, and build the hooks and the training step from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from slipstream.devices import device_type
from slipstream.dist import get_world_size
from slipstream.errors import ConfigError, LossError, ModelError, UnknownNameError, did_you_mean
from slipstream.hooks import EMAHook, Hook
from slipstream.logging import MMLogger, PhaseTimes
from slipstream.model import unwrap_model
from slipstream.model.wrappers import MMFullyShardedDataParallel
from slipstream.optim import OptimWrapper
from slipstream.runner.builders import build_model
from slipstream.runner.interface import ModelInterface, build_interface
from slipstream.speed import PARAMS_OPTIONS, Capabilities, SpeedPlan, compile_model
from slipstream.speed.apply import overrides_train_step, prepare_model, process_settings
from slipstream.speed.ema import EmaOptions
from slipstream.speed.front_ends import is_plain_wrapper
from slipstream.speed.plan import idle
from slipstream.speed.steps import Training, build_step
from slipstream.step import Step
from slipstream.step.backward_passes import check_compiled_backward

__all__ = [
    "PreparedModel",
    "capabilities_of",
    "complete_plan",
    "make_step",
    "plan_hooks",
    "prepare",
    "read_plan",
]


def read_plan(arguments: Mapping[str, Any], cfg: Mapping[str, Any]) -> SpeedPlan:
    """Return the speed options from a Runner's arguments and from `cfg`, the complete configuration.

    If the `speed` argument is None, `cfg["speed"]` is used.

    Raises:
        ConfigError: see `SpeedPlan.read`.
    """
    speed = cfg.get("speed") if arguments.get("speed") is None else arguments["speed"]
    sources = {name: arguments.get(name) for name in ("optim_wrapper", "custom_hooks", "env_cfg")}
    params = cfg.get("training_params")
    for key in params if isinstance(params, Mapping) else ():
        if key not in PARAMS_OPTIONS:
            raise UnknownNameError(
                "a Runner supports only the speed options of training_params; use slipstream.Trainer for the other keys"
                f"{did_you_mean(str(key), PARAMS_OPTIONS)}",
                f"training_params.{key}",
            )
    return SpeedPlan.read(speed, cfg=cfg, **sources, training_params=params, device=device_type())


class PreparedModel(NamedTuple):
    """A Runner's speed plan, and the model to which the plan has been applied."""

    capabilities: Capabilities
    plan: SpeedPlan
    model: nn.Module
    """The model on the device, wrapped if there are several processes."""
    interface: ModelInterface
    """The interface through which the Runner calls the model."""


def prepare(
    arguments: Mapping[str, Any], plan: SpeedPlan, deterministic: bool, device: torch.device, logger: MMLogger
) -> PreparedModel:
    """Build the model from a Runner's arguments, complete the plan, and apply it to the model.

    Raises:
        ConfigError: an argument, an option, or a combination of options is not supported.
    """
    preprocessor, loss_fn = arguments["data_preprocessor"], arguments["loss_fn"]
    model = build_model(arguments["model"], preprocessor, loss_fn)
    capabilities = capabilities_of(model, arguments["optim_wrapper"], deterministic)
    plan = complete_plan(plan, capabilities, logger.info)
    with process_settings(plan, device, logger.warning):
        model = prepare_model(model, plan, device)
    return PreparedModel(capabilities, plan, model, build_interface(model, loss_fn, preprocessor, device))


def capabilities_of(model: nn.Module, optim_wrapper: Any, deterministic: bool) -> Capabilities:
    """Return the capabilities of this machine, and the properties of the model and the run, for `complete_plan`."""
    return Capabilities.here(
        device_type(),
        model,
        world_size=get_world_size(),
        plain_wrapper=is_plain_wrapper(optim_wrapper),
        deterministic=deterministic,
    )


def complete_plan(plan: SpeedPlan, capabilities: Capabilities, log: Callable[[str], None]) -> SpeedPlan:
    """Set the options that depend on the capabilities. Log all options, and the reasons why some have no effect.

    Raises:
        ConfigError: an option, or a combination of options, is not supported for this run.
    """
    plan = plan.complete(capabilities)
    if plan.sources:
        log("Options: " + ", ".join(f"{option} ({source})" for option, source in plan.sources.items()))
    for option, reason in idle(plan, capabilities):
        log(f"{plan.sources[option]} has no effect here: {reason}")
    return plan


def plan_hooks(plan: SpeedPlan) -> list[Hook | Mapping[str, Any]]:
    """Return the hooks that implement the plan's EMA, NaN guard and garbage collection."""
    hooks: list[Hook | Mapping[str, Any]] = []
    if isinstance(plan.ema, EmaOptions):
        ema = plan.ema
        hooks.append(EMAHook(ema.average, begin_iter=ema.begin_iter, begin_epoch=ema.begin_epoch))
    if plan.nan_guard is not None:
        hooks.append(plan.nan_guard.hook_cfg())
    if plan.gc is not None:
        hooks.append({"type": "GcHook", "interval": plan.gc})
    return hooks


def make_step(
    interface: ModelInterface,
    model: Any,
    optim: OptimWrapper,
    plan: SpeedPlan,
    warn: Callable[[str], None],
    log: Callable[[str], None],
) -> Step:
    """Return the training step: the model's `train_step` if the model overrides it, otherwise the plan's step."""
    core: Any = unwrap_model(model)
    owner = next((m for m in (model, core) if overrides_train_step(m)), None)
    if owner is None:
        prepare = partial(_prepare, interface, optim.phases)
        training = Training(model, optim, interface.losses, prepare, interface.reduce)
        return build_step(training, plan, warn, log)
    if owner is core and isinstance(model, DistributedDataParallel | MMFullyShardedDataParallel):
        raise ModelError(
            f"{type(core).__name__} overrides train_step, so {type(model).__name__} cannot synchronize the "
            "gradients; set model_wrapper_cfg=dict(type='MMSeparateDistributedDataParallel')"
        )
    if plan.compile is not None:
        if plan.compile.scope == "step":
            raise ConfigError(
                f"'step' does not support {type(owner).__name__}, which overrides train_step; use scope='model' if "
                "train_step calls the model (`self(...)`); otherwise, use scope='block', and set compile.blocks to the "
                "modules that train_step calls",
                "compile.scope",
            )
        compile_model(core, plan.compile, warn)

    def own_step(batch: Any) -> dict[str, Tensor]:
        try:
            logs: dict[str, Tensor] = owner.train_step(batch, optim)
        except RuntimeError as error:
            check_compiled_backward(
                error, "leave the module whose gradients it differentiates out of compile.blocks"
            )
            raise
        if not isinstance(logs, Mapping):
            raise LossError(
                f"{type(owner).__name__}.train_step must return a dict of tensors to log, not {type(logs).__name__}"
            )
        return logs

    return own_step


def _prepare(interface: ModelInterface, phases: PhaseTimes | None, batch: Any) -> Any:
    if phases is None:
        return interface.prepare(batch, True)
    previous_phase = phases.current
    phases.switch("preprocess")
    inputs = interface.prepare(batch, True)
    phases.switch(previous_phase)
    return inputs
