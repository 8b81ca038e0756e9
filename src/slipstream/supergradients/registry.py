"""SuperGradients' decorators that register classes and functions by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from slipstream import registry

__all__ = [
    "register_callback",
    "register_collate_function",
    "register_dataset",
    "register_loss",
    "register_lr_scheduler",
    "register_metric",
    "register_model",
    "register_optimizer",
    "register_sampler",
    "register_transform",
]

T = TypeVar("T", bound=Callable[..., Any])
Register = Callable[..., Callable[[T], T]]


def _register_in(target: registry.Registry) -> Register[Any]:
    def register(name: str | None = None, deprecated_name: str | None = None) -> Callable[[T], T]:
        """Return a decorator that registers a class or a function under `name` and, if set, `deprecated_name`.

        `name` defaults to the name of the class or function.

        Raises:
            UnknownNameError: if another class or function is registered under one of the names.
        """

        def decorate(kind: T) -> T:
            names = [name or kind.__name__, *([deprecated_name] if deprecated_name else [])]
            target.register_module(name=names, module=kind)
            return kind

        return decorate

    return register


register_callback = _register_in(registry.HOOKS)
register_collate_function = _register_in(registry.FUNCTIONS)
register_dataset = _register_in(registry.DATASETS)
register_loss = _register_in(registry.MODELS)
register_lr_scheduler = _register_in(registry.PARAM_SCHEDULERS)
register_metric = _register_in(registry.METRICS)
register_model = _register_in(registry.MODELS)
register_optimizer = _register_in(registry.OPTIMIZERS)
register_sampler = _register_in(registry.DATA_SAMPLERS)
register_transform = _register_in(registry.TRANSFORMS)
