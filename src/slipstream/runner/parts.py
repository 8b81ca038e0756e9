"""Build the parts of a run from what a Runner was given."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from slipstream.dist import is_distributed
from slipstream.dist.sharding import is_sharded, mesh_of
from slipstream.errors import ConfigError, ModelError
from slipstream.model import (
    BaseModel,
    MMDistributedDataParallel,
    MMSeparateDistributedDataParallel,
    convert_sync_batchnorm,
    unwrap_model,
)
from slipstream.model.base_model import run_forward
from slipstream.model.wrappers import MMFullyShardedDataParallel, device_ids
from slipstream.optim import OptimWrapper, OptimWrapperDict, build_optim_wrapper
from slipstream.optim.scheduler import build_param_scheduler
from slipstream.registry import MODEL_WRAPPERS, MODELS, OPTIM_WRAPPERS
from slipstream.speed import SpeedPlan
from slipstream.step import EagerStep, Step

if TYPE_CHECKING:
    from slipstream.runner.loops import BaseLoop

__all__ = ["build_model", "build_optim", "build_schedulers", "make_step", "scale_lr", "wrap_model"]


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


def wrap_model(model: nn.Module, plan: SpeedPlan, device: torch.device) -> nn.Module:
    """Return the model wrapped for several processes as the plan says; itself if there is one process."""
    if not is_distributed() or isinstance(model, DistributedDataParallel | MMFullyShardedDataParallel):
        return model
    if plan.sync_bn:
        model = convert_sync_batchnorm(model)
    # A model that trains its parts itself calls them, not the wrapper around the whole: each part syncs its own.
    default = MMSeparateDistributedDataParallel if _overrides_train_step(model) else MMDistributedDataParallel
    cfg: dict[str, Any] = {"type": default, **(plan.model_wrapper or {})}
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


def make_step(model: Any, optim: OptimWrapper) -> Step:
    """Return the training step for a model: its own `train_step` if it overrides one, else `EagerStep`."""
    core: Any = unwrap_model(model)
    own = next((m for m in (model, core) if _overrides_train_step(m)), None)
    if own is not None:
        if own is core and isinstance(model, DistributedDataParallel | MMFullyShardedDataParallel):
            raise ModelError(
                f"{type(core).__name__} overrides train_step, so {type(model).__name__} around it would never sync "
                "its gradients: wrap its parts with model_wrapper_cfg=dict(type='MMSeparateDistributedDataParallel')"
            )

        def own_step(batch: Any) -> dict[str, Tensor]:
            logs: dict[str, Tensor] = own.train_step(batch, optim)
            return logs

        return own_step
    preprocess = core.data_preprocessor

    def forward(batch: Any) -> Any:
        return run_forward(model, preprocess(batch, True), "loss")

    return EagerStep(forward, model, optim, core.parse_losses)


def _overrides_train_step(model: nn.Module) -> bool:
    wrappers = (MMDistributedDataParallel.train_step, MMFullyShardedDataParallel.train_step)
    standard = (BaseModel.train_step, *wrappers)
    return getattr(type(model), "train_step", standard[0]) not in standard
