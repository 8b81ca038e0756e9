"""Build the parts of a run from what a Runner was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from slipstream.dist.sharding import is_sharded, mesh_of
from slipstream.errors import ConfigError, ModelError
from slipstream.model import (
    unwrap_model,
)
from slipstream.optim import OptimWrapper, OptimWrapperDict, build_optim_wrapper
from slipstream.optim.scheduler import build_param_scheduler
from slipstream.registry import MODELS, OPTIM_WRAPPERS

if TYPE_CHECKING:
    from slipstream.runner.loops import BaseLoop

__all__ = ["build_model", "build_optim", "build_schedulers", "scale_lr"]


def build_model(model: nn.Module | Mapping[str, Any], data_preprocessor: Any) -> nn.Module:
    """Return the model, built from its configuration if it is one.

    Raises:
        ModelError: it has no `train_step`.
    """
    if isinstance(model, Mapping):
        preset = {"data_preprocessor": data_preprocessor} if data_preprocessor is not None else {}
        model = MODELS.build(model, default_args=preset)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"must be a torch.nn.Module or a dict, not {type(model).__name__}", "model")
    if not hasattr(unwrap_model(model), "train_step"):
        raise ModelError(
            f"{type(model).__name__} has no train_step: derive it from slipstream.model.BaseModel and let "
            "forward(..., mode) return the losses for mode 'loss', or put the network into "
            "slipstream.model.Segmentor or Classifier"
        )
    return model


def build_optim(model: nn.Module, cfg: Any) -> OptimWrapper:
    """Return the optimizer wrapper, or the `OptimWrapperDict` of several, from objects or configurations.

    Raises:
        ConfigError: neither; or an object that was made before the model was sharded.
        ModelError: the model has no trainable parameter.
    """
    optim = _optim(model, cfg)
    if mesh_of(model) is not None and not any(is_sharded(p) for g in optim.param_groups for p in g["params"]):
        raise ConfigError(
            "it holds the weights from before the model was sharded, and would move them in vain: "
            "give a dict, from which it is built afterwards"
        )
    return optim


def _optim(model: nn.Module, cfg: Any) -> OptimWrapper:
    if isinstance(cfg, OptimWrapper):
        return cfg
    if isinstance(cfg, Optimizer):
        return OptimWrapper(cfg)
    if not isinstance(cfg, Mapping):
        raise ConfigError(f"must be an OptimWrapper or a dict, not {type(cfg).__name__}")
    if isinstance(cfg.get("optimizer"), Optimizer):
        return _one(cfg)
    if "optimizer" in cfg or "constructor" in cfg:
        return build_optim_wrapper(unwrap_model(model), cfg)
    if cfg and all(isinstance(part, OptimWrapper) for part in cfg.values()):
        return OptimWrapperDict(**cfg)
    raise ConfigError(f"needs an 'optimizer' (or must map names to OptimWrapper objects); got {sorted(cfg)}")


def _one(cfg: Mapping[str, Any]) -> OptimWrapper:
    wrapper: OptimWrapper = OPTIM_WRAPPERS.build(cfg, default_args={"type": "OptimWrapper"})
    return wrapper


def build_schedulers(cfg: Any, optim: OptimWrapper, loop: BaseLoop) -> Any:
    """Return the list of schedulers, or a dict of lists for an `OptimWrapperDict`."""
    if isinstance(optim, OptimWrapperDict):
        named = isinstance(cfg, Mapping) and "type" not in cfg and set(cfg) <= set(optim)
        per_name = {name: cfg.get(name) if named else cfg for name in optim}
        return {name: _schedulers(part, optim[name], loop) for name, part in per_name.items()}
    return _schedulers(cfg, optim, loop)


def _schedulers(cfg: Any, optim: OptimWrapper, loop: Any) -> list[Any]:
    several = isinstance(cfg, Sequence) and not isinstance(cfg, str)
    parts = cfg if several else [] if cfg is None else [cfg]
    return [_scheduler(part, optim, loop) for part in parts]


def _scheduler(cfg: Any, optim: OptimWrapper, loop: Any) -> Any:
    if isinstance(cfg, str | int | float):
        raise ConfigError(f"a schedule is an object or a dict with a 'type', not {cfg!r}", "param_scheduler")
    try:
        return build_param_scheduler(
            cfg,
            optim.optimizer,
            epoch_length=loop.epoch_length,
            max_epochs=loop.max_epochs,
            max_iters=loop.max_iters,
        )
    except ConfigError as error:
        error.source = cfg  # type: ignore[attr-defined]  # the dict as it stands in the configuration
        raise


def scale_lr(optim: OptimWrapper, options: Mapping[str, Any], samples: int) -> str:
    """Multiply every learning rate by `samples` (of a step) over `base_batch_size`, and say so."""
    base = options.get("base_batch_size")
    if not isinstance(base, int) or base < 1:
        raise ConfigError(f"needs a base_batch_size of at least 1, not {base!r}", "auto_scale_lr")
    factor = samples / base
    for group in optim.param_groups:
        for name in ("lr", "initial_lr"):
            if name in group:
                group[name] = group[name] * factor
    return (
        f"Learning rates are scaled by {samples}/{base} = {factor:g} "
        "(samples per step over base_batch_size; accumulation is not counted)"
    )
