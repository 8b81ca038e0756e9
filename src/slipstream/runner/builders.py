"""Build a run's speed plan, model, optimizer, schedulers, hooks and training step from the Runner's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from slipstream.config.merge import join
from slipstream.dataset.loading.loader import batch_size
from slipstream.devices import device_type
from slipstream.dist import get_world_size
from slipstream.errors import ConfigError, LossError, ModelError, UnknownNameError, did_you_mean
from slipstream.hooks import EMAHook, Hook
from slipstream.logging import MMLogger, PhaseTimes
from slipstream.model import EmaOptions, unwrap_model
from slipstream.model.wrappers import MMFullyShardedDataParallel
from slipstream.optim import OptimWrapper, OptimWrapperDict, build_optim_wrapper
from slipstream.optim.scheduler import INF, TorchSchedulerAdapter, build_param_scheduler, last_change
from slipstream.registry import MODELS, OPTIM_WRAPPERS
from slipstream.runner.interface import ModelInterface
from slipstream.sharding import is_sharded, mesh_of
from slipstream.speed import PARAMS_OPTIONS, Capabilities, SpeedPlan
from slipstream.speed.apply import overrides_train_step, prepare_model
from slipstream.speed.front_ends import is_plain_wrapper
from slipstream.speed.steps import StepSpec, build_step
from slipstream.step import Step
from slipstream.step.function import check_backward
from slipstream.step.losses import AVERAGED_OVER

if TYPE_CHECKING:
    from slipstream.runner.loops import BaseLoop


def build_model(
    model: nn.Module | Mapping[str, Any], data_preprocessor: Any, loss_fn: Any = None
) -> nn.Module:
    """Return `model`, or build and return the model if `model` is a configuration.

    Raises:
        ConfigError: `model` is neither a module nor a dict, or `loss_fn` is set for a model with a `train_step`.
        ModelError: the model has no `train_step`, and `loss_fn` is None.
    """
    if isinstance(model, Mapping):
        without_preprocessor = loss_fn is not None or data_preprocessor is None
        default_args = {} if without_preprocessor else {"data_preprocessor": data_preprocessor}
        model = MODELS.build(model, default_args=default_args)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"must be a torch.nn.Module or a dict, not {type(model).__name__}", "model")
    has_train_step = hasattr(unwrap_model(model), "train_step")
    if has_train_step and loss_fn is not None:
        raise ConfigError(
            f"does not apply to {type(model).__name__}, which computes its losses in train_step; remove loss_fn",
            "loss_fn",
        )
    if not has_train_step and loss_fn is None:
        raise ModelError(
            f"{type(model).__name__} has no train_step. Pass loss_fn to the Runner (a function of outputs and targets, "
            "or 'model' if the model returns its loss), or subclass slipstream.model.BaseModel and return the losses "
            "from forward(..., mode='loss')"
        )
    return model


def build_optim(model: nn.Module, cfg: Any) -> OptimWrapper:
    """Return the optimizer wrapper, or an `OptimWrapperDict` for several optimizers.

    Args:
        model: the model whose parameters are optimized.
        cfg: an `OptimWrapper`, an optimizer, a configuration, or a dict of `OptimWrapper` objects.

    Raises:
        ConfigError: `cfg` is none of these, or the optimizer was created before the model was sharded.
        ModelError: the model has no trainable parameters.
    """
    optim = _optim(model, cfg)
    if mesh_of(model) is not None and not any(is_sharded(p) for g in optim.param_groups for p in g["params"]):
        raise ConfigError(
            "the optimizer was created before the model was sharded and refers to the unsharded parameters; "
            "pass a dict instead, so that the optimizer is built after sharding"
        )
    return optim


def _optim(model: nn.Module, cfg: Any) -> OptimWrapper:
    if isinstance(cfg, OptimWrapper):
        return cfg
    if isinstance(cfg, Optimizer):
        return OptimWrapper(cfg)
    if not isinstance(cfg, Mapping):
        raise ConfigError(f"must be an OptimWrapper, an optimizer or a dict, not {type(cfg).__name__}")
    if isinstance(cfg.get("optimizer"), Optimizer):
        return OPTIM_WRAPPERS.build(cfg, default_args={"type": "OptimWrapper"})
    if "optimizer" in cfg or "constructor" in cfg:
        return build_optim_wrapper(unwrap_model(model), cfg)
    if cfg and all(isinstance(part, OptimWrapper) for part in cfg.values()):
        return OptimWrapperDict(**cfg)
    raise ConfigError(
        f"must contain the key 'optimizer' or 'constructor', or only OptimWrapper objects, such as "
        f"OptimWrapper(torch.optim.Adam(model.generator.parameters())); got the keys {sorted(map(str, cfg))}"
    )


def build_schedulers(cfg: Any, optim: OptimWrapper, loop: BaseLoop, lr_scaled: bool = False) -> Any:
    """Return the list of schedulers, or a dict of lists for an `OptimWrapperDict`.

    Args:
        cfg: one or more schedulers or configurations, or a dict that maps optimizer names to schedulers.
        optim: the optimizer wrapper.
        loop: the training loop.
        lr_scaled: whether `auto_scale_lr` has changed the learning rates.

    Raises:
        ConfigError: a scheduler is invalid or was created before the learning rates were scaled, or a torch scheduler
            never steps or ends too early.
    """
    if lr_scaled:
        _check_no_scheduler_objects(cfg)
    if not isinstance(optim, OptimWrapperDict):
        return _schedulers(cfg, optim, loop, "param_scheduler")
    if not isinstance(cfg, Mapping) or {"type", "scheduler"} & set(cfg):
        return {name: _schedulers(cfg, wrapper, loop, "param_scheduler") for name, wrapper in optim.items()}
    for name in set(cfg) - set(optim):
        raise ConfigError(f"'{name}' is not an optimizer{did_you_mean(name, optim)}", "param_scheduler")
    return {
        name: _schedulers(cfg.get(name), wrapper, loop, f"param_scheduler.{name}")
        for name, wrapper in optim.items()
    }


def _check_no_scheduler_objects(cfg: Any) -> None:
    """Check that no scheduler object was created before `auto_scale_lr` scaled the learning rates."""
    if isinstance(cfg, Mapping) and "type" not in cfg and "scheduler" not in cfg:
        cfg = list(cfg.values())
    if isinstance(cfg, list | tuple):
        for part in cfg:
            _check_no_scheduler_objects(part)
    elif cfg is not None and (not isinstance(cfg, Mapping) or "scheduler" in cfg):
        raise ConfigError(
            "a scheduler object was created before auto_scale_lr scaled the learning rates, so it would restore "
            "the unscaled rates; pass a configuration (a dict with a 'type')",
            "param_scheduler",
        )


def _schedulers(cfg: Any, optim: OptimWrapper, loop: Any, path: str) -> list[Any]:
    if isinstance(cfg, list | tuple):
        return [_scheduler(part, optim, loop, f"{path}[{index}]") for index, part in enumerate(cfg)]
    return [] if cfg is None else [_scheduler(cfg, optim, loop, path)]


def _scheduler(cfg: Any, optim: OptimWrapper, loop: Any, path: str) -> Any:
    updates = optim.accumulation.windows_between(0, loop.max_iters) if loop.max_iters < INF else None
    try:
        scheduler = build_param_scheduler(
            cfg,
            optim.optimizer,
            epoch_length=loop.epoch_length,
            max_epochs=loop.max_epochs,
            max_iters=loop.max_iters,
            max_updates=updates,
        )
        if message := _check_length(scheduler, loop, updates):
            loop.runner.logger.warning(f"{path}: {message}")
        return scheduler
    except ConfigError as error:
        error.path = join(path, error.path) if error.path else path
        error.source = None  # the path is complete
        raise


def _check_length(scheduler: Any, loop: Any, updates: int | None) -> str:
    """Return a warning if `scheduler` never steps, or if its schedule probably has another length; otherwise ''.

    Raises:
        ConfigError: a torch scheduler never steps, or torch would raise an error before the end of the run.
    """
    inner = getattr(scheduler, "scheduler", scheduler)
    name = type(inner).__name__
    by_epoch = getattr(scheduler, "by_epoch", False)
    if getattr(scheduler, "need_val_args", False) and loop.runner.val_loop is None:
        return f"{name} has no effect, because the Runner has no validation"
    if by_epoch and not getattr(loop, "counts_epochs", True):
        message = (
            f"{name} steps after each epoch, but training is iteration-based (train_cfg.by_epoch=False), so the "
            "value would not change before the end of training; set by_epoch=False in the scheduler"
        )
        if isinstance(scheduler, TorchSchedulerAdapter):
            raise ConfigError(message)
        return "" if getattr(scheduler, "need_val_args", False) else message
    per_update = getattr(scheduler, "per_update", None)
    change = last_change(inner)
    steps = loop.max_epochs if by_epoch else updates if per_update else loop.max_iters
    of_torch = isinstance(scheduler, TorchSchedulerAdapter)
    if of_torch and not by_epoch and per_update is None and change is None and updates not in (None, steps):
        return (
            f"{name} steps after each of the {steps} batches, but with accumulation, the run has {updates} updates; "
            "set interval='update' if the schedule counts updates, as in Lightning and Accelerate, or interval='batch'"
        )
    if change is None or steps is None or steps >= INF:
        return ""
    argument, count = change
    unit = "epochs" if by_epoch else "updates" if per_update else "iterations"
    text = f"{name} has {argument}={count}, but the run has {steps} {unit}"
    if isinstance(inner, OneCycleLR) and count < steps and getattr(scheduler, "end", steps) >= steps:
        raise ConfigError(f"{text}, and torch raises an error after the schedule; set {argument}={steps}")
    # A short run tests the schedule of the full run.
    too_long = count > steps and loop.runner.limits.train is None
    return f"{text}; set {argument}={steps}, or by_epoch to match its unit" if too_long else ""


def scale_lr(optim: OptimWrapper, base: int, loader: DataLoader[Any]) -> str:
    """Multiply every learning rate by `samples per step / base`, and return a log message.

    Args:
        optim: the optimizer wrapper.
        base: the batch size for which the learning rates were chosen.
        loader: the training loader.

    Raises:
        ConfigError: the loader is a list of batches, or uses a custom batch sampler without a batch size.
    """
    size = batch_size(loader)
    if size is None:
        raise ConfigError(
            "requires a loader with a batch size, because the learning rates are multiplied by the samples per step; "
            "set the learning rates yourself, or pass a DataLoader or a dict with batch_size",
            "auto_scale_lr",
        )
    samples = size * get_world_size()
    factor = samples / base
    for group in optim.param_groups:
        for name in {"lr", "initial_lr"} & group.keys():
            group[name] = group[name] * factor
    return (
        f"Scaled the learning rates by {samples}/{base} = {factor:g} "
        "(samples per step / base_batch_size; accumulation steps are not counted)"
    )


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


def prepare(
    model: nn.Module,
    optim_wrapper: Any,
    plan: SpeedPlan,
    deterministic: bool,
    device: torch.device,
    logger: MMLogger,
) -> tuple[SpeedPlan, nn.Module]:
    """Complete the plan, and apply it to the model.

    Returns:
        The complete plan, and the model on its device, wrapped if there are several processes.

    Raises:
        ConfigError: an option, or a combination of options, is not supported.
    """
    plan = plan.complete(capabilities_of(model, optim_wrapper, deterministic))
    if plan.sources:
        logger.info(
            "Options: " + ", ".join(f"{option} ({source})" for option, source in plan.sources.items())
        )
    return plan, prepare_model(model, plan, device)


def capabilities_of(model: nn.Module, optim_wrapper: Any, deterministic: bool) -> Capabilities:
    """Return the capabilities of this machine, and the properties of the model and the run."""
    return Capabilities.here(
        device_type(),
        model,
        world_size=get_world_size(),
        plain_wrapper=is_plain_wrapper(optim_wrapper),
        deterministic=deterministic,
    )


def plan_hooks(plan: SpeedPlan) -> list[Hook | Mapping[str, Any]]:
    """Return the hooks that implement the plan's EMA, NaN guard and garbage collection."""
    hooks: list[Hook | Mapping[str, Any]] = []
    if isinstance(plan.ema, EmaOptions):
        ema = plan.ema
        hook = EMAHook(ema.average, begin_iter=ema.begin_iter, begin_epoch=ema.begin_epoch)
        hook.option = plan.config_path("ema")
        hooks.append(hook)
    if plan.nan_guard is not None:
        hooks.append({"type": "NanGuardHook", **asdict(plan.nan_guard)})
    if plan.gc is not None:
        hooks.append({"type": "GcHook", "interval": plan.gc})
    return hooks


def make_step(
    interface: ModelInterface,
    model: Any,
    optim: OptimWrapper,
    plan: SpeedPlan,
    logger: MMLogger,
    phases: PhaseTimes,
) -> Step:
    """Return the training step: the model's `train_step` if the model overrides it, otherwise the plan's step."""
    core: Any = unwrap_model(model)
    owner = next((m for m in (model, core) if overrides_train_step(m)), None)
    if owner is None:
        timed = phases if phases.running else None
        spec = StepSpec(model, optim, interface.losses, interface.prepare(training=True), timed)
        return build_step(spec, plan, logger.warning, logger.info)
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
        from slipstream.speed.compiled_modules import compile_model  # most runs do not compile

        compile_model(core, plan.compile, logger.warning, optim, logger.info)

    def own_step(batch: Any) -> dict[str, Tensor]:
        wrappers = list(optim.values()) if isinstance(optim, OptimWrapperDict) else [optim]
        for each in wrappers:
            for part in each.parts:
                part.before_batch()
        try:
            logs: dict[str, Tensor] = owner.train_step(batch, optim)
        except RuntimeError as error:
            check_backward(error)
            raise
        if not isinstance(logs, Mapping):
            raise LossError(
                f"{type(owner).__name__}.train_step must return a dict of tensors to log, not {type(logs).__name__}"
            )
        if AVERAGED_OVER in logs and all(each.objects is None for each in wrappers):
            raise LossError(
                f"{type(owner).__name__}.train_step returns '{AVERAGED_OVER}', but does not weight its losses; call "
                f"optim_wrapper.update_params(loss, {AVERAGED_OVER}=...)"
            )
        return logs

    return own_step
