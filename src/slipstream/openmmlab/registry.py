"""MMEngine's root registries, which are children of Slipstream's registries and serve the OpenMMLab libraries.

Names are looked up here first, and then in Slipstream's registries. Therefore, classes from MMEngine and the libraries
take precedence over Slipstream's classes with the same name, such as `Normalize`. Slipstream's own registries do not
contain the classes that are registered here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import slipstream.registry as own
from slipstream.registry import Registry, build_from_cfg, default_scope, init_default_scope
from slipstream.registry.registry import current_scope

__all__ = [
    "DATASETS", "DATA_SAMPLERS", "EVALUATOR", "FUNCTIONS", "HOOKS", "INFERENCERS", "LOG_PROCESSORS", "LOOPS",
    "METRICS", "MODELS", "MODEL_WRAPPERS", "OPTIMIZERS", "OPTIM_WRAPPERS", "OPTIM_WRAPPER_CONSTRUCTORS",
    "PARAM_SCHEDULERS", "RUNNERS", "RUNNER_CONSTRUCTORS", "STRATEGIES", "TASK_UTILS", "TRANSFORMS",
    "VISBACKENDS", "VISUALIZERS", "WEIGHT_INITIALIZERS", "DefaultScope", "Registry", "build_from_cfg",
    "build_model_from_cfg", "build_runner_from_cfg", "build_scheduler_from_cfg", "init_default_scope",
]  # fmt: skip


def _child(parent: Registry, *locations: str) -> Registry:
    return Registry(parent.name, parent=parent, scope="mmengine", locations=locations)


RUNNERS = _child(own.RUNNERS, f"{__package__}.runner")
RUNNER_CONSTRUCTORS = _child(own.RUNNER_CONSTRUCTORS)
LOOPS = _child(own.LOOPS)
HOOKS = _child(own.HOOKS, f"{__package__}.hooks")
LOG_PROCESSORS = _child(own.LOG_PROCESSORS)
STRATEGIES = _child(own.STRATEGIES)
DATASETS = _child(own.DATASETS, "mmengine.dataset")
DATA_SAMPLERS = _child(own.DATA_SAMPLERS)
TRANSFORMS = _child(own.TRANSFORMS)
FUNCTIONS = _child(own.FUNCTIONS, "mmengine.dataset")
MODELS = _child(own.MODELS, "mmengine.model")
MODEL_WRAPPERS = _child(own.MODEL_WRAPPERS)
WEIGHT_INITIALIZERS = _child(own.WEIGHT_INITIALIZERS, "mmengine.model")
OPTIMIZERS = _child(own.OPTIMIZERS)
OPTIM_WRAPPERS = _child(own.OPTIM_WRAPPERS)
OPTIM_WRAPPER_CONSTRUCTORS = _child(own.OPTIM_WRAPPER_CONSTRUCTORS, f"{__package__}.optim")
PARAM_SCHEDULERS = _child(own.PARAM_SCHEDULERS, f"{__package__}.schedulers")
METRICS = _child(own.METRICS, f"{__package__}.evaluator")
EVALUATOR = _child(own.EVALUATOR)
VISUALIZERS = _child(own.VISUALIZERS, f"{__package__}.visualization")
VISBACKENDS = _child(own.VISBACKENDS)
TASK_UTILS = _child(own.TASK_UTILS)
INFERENCERS = _child(own.INFERENCERS)


def build_model_from_cfg(cfg: Any, registry: Registry, default_args: Any = None) -> Any:
    """Build a module from a configuration, or an `nn.Sequential` from a list of configurations."""
    return own.MODELS.build_func(cfg, default_args=default_args, registry=registry)


def build_runner_from_cfg(cfg: Any, registry: Registry) -> Any:
    """Build a Runner from a configuration. The `runner_type` key specifies the Runner class (default: `Runner`)."""
    return registry.resolve(cfg.get("runner_type", "Runner")).from_cfg(cfg)


def build_scheduler_from_cfg(cfg: Any, registry: Registry, default_args: Any = None) -> Any:
    """Build a parameter scheduler from a configuration."""
    return build_from_cfg(cfg, registry, default_args)


RUNNERS.build_func = build_runner_from_cfg


class DefaultScope:
    """A named default scope. `get_instance` creates an instance and makes its scope the current default scope.

    Args:
        name: name of the instance; has no effect.
        scope_name: the scope.
    """

    def __init__(self, name: str, scope_name: str) -> None:
        self.instance_name = name
        self.scope_name = scope_name

    @classmethod
    def get_instance(cls, name: str, scope_name: str = "mmengine", **kwargs: Any) -> DefaultScope:
        """Make `scope_name` the default scope of the current context, and return it as a `DefaultScope`."""
        init_default_scope(scope_name)
        return cls(name, scope_name)

    @classmethod
    def get_current_instance(cls) -> DefaultScope | None:
        """Return the default scope of the current context, or None if there is none."""
        name = current_scope()
        return None if name is None else cls(name, name)

    @classmethod
    def check_instance_created(cls, name: str) -> bool:
        """Return whether the current context has a default scope."""
        return current_scope() is not None

    @classmethod
    @contextmanager
    def overwrite_default_scope(cls, scope_name: str | None) -> Iterator[None]:
        """Use `scope_name` as the default scope inside the `with` block; None keeps the current scope."""
        with default_scope(current_scope() if scope_name is None else scope_name):
            yield
