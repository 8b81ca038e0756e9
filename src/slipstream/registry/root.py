"""The root registries, named as in MMEngine. Downstream libraries add child registries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.registry.registry import ROOT_SCOPE, Registry, build_from_cfg

__all__ = [
    "DATASETS", "DATA_SAMPLERS", "EVALUATOR", "FUNCTIONS", "HOOKS", "INFERENCERS", "LOG_PROCESSORS", "LOOPS",
    "METRICS", "MODELS", "MODEL_WRAPPERS", "OPTIMIZERS", "OPTIM_WRAPPERS", "OPTIM_WRAPPER_CONSTRUCTORS",
    "PARAM_SCHEDULERS", "RUNNERS", "RUNNER_CONSTRUCTORS", "STRATEGIES", "TASK_UTILS", "TRANSFORMS",
    "VISBACKENDS", "VISUALIZERS", "WEIGHT_INITIALIZERS",
]  # fmt: skip


def _root(name: str, *locations: str, namespaces: Sequence[str] = (), **kwargs: Any) -> Registry:
    return Registry(name, scope=ROOT_SCOPE, locations=locations, namespaces=namespaces, **kwargs)


def _build_model(cfg: Any, registry: Registry, default_args: Any = None) -> Any:
    """Build a module, or an `nn.Sequential` from a list of configurations."""
    if isinstance(cfg, list | tuple):
        from torch import nn

        return nn.Sequential(*(build_from_cfg(item, registry, default_args) for item in cfg))
    return build_from_cfg(cfg, registry, default_args)


RUNNERS = _root("runner", "slipstream.runner")
RUNNER_CONSTRUCTORS = _root("runner constructor")
LOOPS = _root("loop", "slipstream.runner.loops")
HOOKS = _root(
    "hook",
    "slipstream.training.network",
    "slipstream.training.distillation",
    "slipstream.training.callbacks",
    "slipstream.training.user_schedules",
    "slipstream.hooks",
)
LOG_PROCESSORS = _root("log processor", "slipstream.runner.log_processor")
STRATEGIES = _root("strategy")

DATASETS = _root("dataset", "slipstream.dataset", "slipstream.zoo.street_scenes")
DATA_SAMPLERS = _root("data sampler", "slipstream.dataset", namespaces=["torch.utils.data"])
TRANSFORMS = _root("transform", "slipstream.dataset")
FUNCTIONS = _root("function", "slipstream.dataset")

MODELS = _root(
    "model",
    "slipstream.training.network",
    "slipstream.training.distillation",
    "slipstream.training.losses",
    "slipstream.zoo",
    "slipstream.model",
    build_func=_build_model,
    namespaces=["torch.nn"],
)
MODEL_WRAPPERS = _root("model wrapper", "slipstream.model.wrappers")
WEIGHT_INITIALIZERS = _root("weight initializer", "slipstream.model.weight_init")

OPTIMIZERS = _root(
    "optimizer",
    "slipstream.optim",
    namespaces=["torch.optim", "torch.distributed.optim", "pytorch_optimizer.optimizer"],
)
OPTIM_WRAPPERS = _root("optimizer wrapper", "slipstream.optim")
OPTIM_WRAPPER_CONSTRUCTORS = _root(
    "optimizer wrapper constructor", "slipstream.training.optimizers", "slipstream.optim"
)
PARAM_SCHEDULERS = _root(
    "parameter scheduler",
    "slipstream.training.schedules",
    "slipstream.optim.scheduler",
    namespaces=["torch.optim.lr_scheduler"],
)

METRICS = _root(
    "metric",
    "slipstream.training.metrics",
    "slipstream.training.losses",
    "slipstream.evaluator",
    namespaces=["torchmetrics", "torchmetrics.classification", "torchmetrics.segmentation"],
)
EVALUATOR = _root("evaluator", "slipstream.evaluator")

VISUALIZERS = _root("visualizer", "slipstream.visualization")
VISBACKENDS = _root("visualization backend", "slipstream.visualization")
TASK_UTILS = _root("task utility")
INFERENCERS = _root("inferencer")
