"""Build a run's model, optimizer and schedulers from the Runner's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from slipstream.config.merge import join
from slipstream.dataset.loading.loader import batch_size
from slipstream.errors import ConfigError, ModelError, did_you_mean
from slipstream.model import unwrap_model
from slipstream.optim import OptimWrapper, OptimWrapperDict, build_optim_wrapper
from slipstream.optim.scheduler import INF, TorchSchedulerAdapter, build_param_scheduler, last_change
from slipstream.registry import MODELS, OPTIM_WRAPPERS
from slipstream.sharding import is_sharded, mesh_of

if TYPE_CHECKING:
    from slipstream.runner.loops import BaseLoop

__all__ = ["build_model", "build_optim", "build_schedulers", "scale_lr"]


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
        return _build_wrapper(cfg)
    if "optimizer" in cfg or "constructor" in cfg:
        return build_optim_wrapper(unwrap_model(model), cfg)
    if cfg and all(isinstance(part, OptimWrapper) for part in cfg.values()):
        return OptimWrapperDict(**cfg)
    raise ConfigError(
        f"must contain the key 'optimizer' or 'constructor', or only OptimWrapper objects, such as "
        f"OptimWrapper(torch.optim.Adam(model.generator.parameters())); got the keys {sorted(map(str, cfg))}"
    )


def _build_wrapper(cfg: Mapping[str, Any]) -> OptimWrapper:
    wrapper: OptimWrapper = OPTIM_WRAPPERS.build(cfg, default_args={"type": "OptimWrapper"})
    return wrapper


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
    if isinstance(optim, OptimWrapperDict):
        is_per_optimizer = isinstance(cfg, Mapping) and not {"type", "scheduler"} & set(cfg)
        for name in set(cfg) - set(optim) if is_per_optimizer else ():
            raise ConfigError(f"'{name}' is not an optimizer{did_you_mean(name, optim)}", "param_scheduler")
        cfg_by_name = {name: cfg.get(name) if is_per_optimizer else cfg for name in optim}
        return {
            name: _schedulers(
                part, optim[name], loop, f"param_scheduler.{name}" if is_per_optimizer else "param_scheduler"
            )
            for name, part in cfg_by_name.items()
        }
    return _schedulers(cfg, optim, loop, "param_scheduler")


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
    try:
        scheduler = build_param_scheduler(
            cfg,
            optim.optimizer,
            epoch_length=loop.epoch_length,
            max_epochs=loop.max_epochs,
            max_iters=loop.max_iters,
        )
        if message := _check_length(scheduler, loop):
            loop.runner.logger.warning(f"{path}: {message}")
        return scheduler
    except ConfigError as error:
        error.path = join(path, error.path) if error.path else path
        error.source = None  # type: ignore[attr-defined]  # the path is complete
        raise


def _check_length(scheduler: Any, loop: Any) -> str:
    """Return a warning if `scheduler` never steps, or if its schedule is longer than the run; otherwise ''.

    Raises:
        ConfigError: a torch scheduler never steps, or torch would raise an error before the end of the run.
    """
    inner = getattr(scheduler, "scheduler", scheduler)
    name = type(inner).__name__
    by_epoch = getattr(scheduler, "by_epoch", False)
    if by_epoch and not getattr(loop, "counts_epochs", True):
        message = (
            f"{name} steps after each epoch, but training is iteration-based (train_cfg.by_epoch=False), so the "
            "value would not change before the end of training; set by_epoch=False in the scheduler"
        )
        if isinstance(scheduler, TorchSchedulerAdapter):
            raise ConfigError(message)
        return "" if getattr(scheduler, "need_val_args", False) else message
    change, steps = last_change(inner), loop.max_epochs if by_epoch else loop.max_iters
    if change is None or steps is None or steps >= INF:
        return ""
    argument, count = change
    text = f"{name} has {argument}={count}, but the run has {steps} {'epochs' if by_epoch else 'iterations'}"
    if isinstance(inner, OneCycleLR) and count < steps and getattr(scheduler, "end", steps) >= steps:
        raise ConfigError(f"{text}, and torch raises an error after the schedule; set {argument}={steps}")
    # A short run tests the schedule of the full run.
    too_long = count > steps and loop.runner.limits.train is None
    return f"{text}; set {argument}={steps}, or by_epoch to match its unit" if too_long else ""


def check_batch_size(loader: Any) -> None:
    """Check that the loader has a batch size, from which `auto_scale_lr` computes the learning rates.

    Raises:
        ConfigError: the loader is a list of batches, or uses a custom batch sampler without a batch size.
    """
    if batch_size(loader) is None:
        raise ConfigError(
            "requires a loader with a batch size, because the learning rates are multiplied by the samples per step; "
            "set the learning rates yourself, or pass a DataLoader or a dict with batch_size",
            "auto_scale_lr",
        )


def scale_lr(optim: OptimWrapper, base: int, samples: int) -> str:
    """Multiply every learning rate by `samples / base`, and return a log message.

    Args:
        optim: the optimizer wrapper.
        base: the batch size for which the learning rates were chosen.
        samples: number of samples per step.
    """
    factor = samples / base
    for group in optim.param_groups:
        for name in ("lr", "initial_lr"):
            if name in group:
                group[name] = group[name] * factor
    return (
        f"Scaled the learning rates by {samples}/{base} = {factor:g} "
        "(samples per step / base_batch_size; accumulation steps are not counted)"
    )
