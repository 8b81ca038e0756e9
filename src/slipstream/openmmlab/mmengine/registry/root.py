"""MMEngine's root registries."""

from __future__ import annotations

from typing import Any

import slipstream.registry as own
from slipstream.registry import Registry, build_from_cfg

__all__ = [
    "DATASETS",
    "DATA_SAMPLERS",
    "EVALUATOR",
    "FUNCTIONS",
    "HOOKS",
    "INFERENCERS",
    "LOG_PROCESSORS",
    "LOOPS",
    "METRICS",
    "MODELS",
    "MODEL_WRAPPERS",
    "OPTIMIZERS",
    "OPTIM_WRAPPERS",
    "OPTIM_WRAPPER_CONSTRUCTORS",
    "PARAM_SCHEDULERS",
    "RUNNERS",
    "RUNNER_CONSTRUCTORS",
    "STRATEGIES",
    "TASK_UTILS",
    "TRANSFORMS",
    "VISBACKENDS",
    "VISUALIZERS",
    "WEIGHT_INITIALIZERS",
    "build_model_from_cfg",
    "build_runner_from_cfg",
    "build_scheduler_from_cfg",
]

_PACKAGE = "slipstream.openmmlab.mmengine"


def _child(parent: Registry, *modules: str) -> Registry:
    return Registry(
        parent.name, parent=parent, scope="mmengine", locations=[f"{_PACKAGE}.{name}" for name in modules]
    )


RUNNERS = _child(own.RUNNERS, "runner")
RUNNER_CONSTRUCTORS = _child(own.RUNNER_CONSTRUCTORS)
LOOPS = _child(own.LOOPS)
HOOKS = _child(own.HOOKS, "hooks")
LOG_PROCESSORS = _child(own.LOG_PROCESSORS)
STRATEGIES = _child(own.STRATEGIES)
DATASETS = _child(own.DATASETS, "dataset")
DATA_SAMPLERS = _child(own.DATA_SAMPLERS, "dataset")
TRANSFORMS = _child(own.TRANSFORMS)
FUNCTIONS = _child(own.FUNCTIONS, "dataset")
MODELS = _child(own.MODELS, "model")
MODEL_WRAPPERS = _child(own.MODEL_WRAPPERS)
WEIGHT_INITIALIZERS = _child(own.WEIGHT_INITIALIZERS)
OPTIMIZERS = _child(own.OPTIMIZERS)
OPTIM_WRAPPERS = _child(own.OPTIM_WRAPPERS)
OPTIM_WRAPPER_CONSTRUCTORS = _child(own.OPTIM_WRAPPER_CONSTRUCTORS, "optim")
PARAM_SCHEDULERS = _child(own.PARAM_SCHEDULERS, "optim.scheduler")
METRICS = _child(own.METRICS, "evaluator")
EVALUATOR = _child(own.EVALUATOR)
VISUALIZERS = _child(own.VISUALIZERS, "visualization")
VISBACKENDS = _child(own.VISBACKENDS)
TASK_UTILS = _child(own.TASK_UTILS)
INFERENCERS = _child(own.INFERENCERS)


def build_model_from_cfg(cfg: Any, registry: Registry, default_args: Any = None) -> Any:
    """Build a module from a configuration, or an `nn.Sequential` from a list of configurations."""
    return own.MODELS.build_func(cfg, default_args=default_args, registry=registry)


def build_runner_from_cfg(cfg: Any, registry: Registry) -> Any:
    """Build a Runner from a configuration. The `runner_type` key specifies the Runner class (default: `Runner`)."""
    from slipstream.openmmlab.mmengine.runner import Runner

    kind = cfg.get("runner_type", "Runner")
    return (registry.get(kind) or Runner).from_cfg(cfg)


def build_scheduler_from_cfg(cfg: Any, registry: Registry, default_args: Any = None) -> Any:
    """Build a parameter scheduler from a configuration."""
    return build_from_cfg(cfg, registry, default_args)


RUNNERS.build_func = build_runner_from_cfg
