"""Mixins that select the option to schedule: the learning rate or the momentum."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from slipstream.errors import ConfigError
from slipstream.optim.scheduler.base import _ParamScheduler
from slipstream.optim.scheduler.values import BetaValues, ParamValues

__all__ = ["LRSchedulerMixin", "MomentumSchedulerMixin"]


class LRSchedulerMixin:
    """Mixin for learning rate schedulers, which have no `param_name` argument.

    In the list of base classes, this mixin must precede the `...ParamScheduler` class.
    """

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, "lr", *args, **kwargs)  # type: ignore[call-arg]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _show_arguments(cls, LRSchedulerMixin)


class MomentumSchedulerMixin:
    """Mixin for schedulers of `momentum` or Adam's first beta.

    In the list of base classes, this mixin must precede the `...ParamScheduler` class.

    Raises:
        ConfigError: the optimizer has neither momentum nor betas.
    """

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        groups = getattr(optimizer, "param_groups", [])
        # Check betas first, because a momentum scheduler adds a copy of the first beta to Adam's groups as `momentum`.
        self.use_betas = all("betas" in group for group in groups)
        if not self.use_betas and not all("momentum" in group for group in groups):
            name = type(getattr(optimizer, "optimizer", optimizer)).__name__
            raise ConfigError(f"{name} has neither momentum nor betas; remove the momentum scheduler")
        super().__init__(optimizer, "momentum", *args, **kwargs)  # type: ignore[call-arg]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _show_arguments(cls, MomentumSchedulerMixin)

    def _make_values(self) -> ParamValues:
        optimizer: Any = self.optimizer  # type: ignore[attr-defined]
        return BetaValues(optimizer) if self.use_betas else ParamValues(optimizer, "momentum")


def _show_arguments(cls: type, mixin: Any) -> None:
    """Add an `__init__` with the scheduler's signature to `cls`, for `help()` and the registry's checks."""
    if "__init__" in vars(cls) or mixin not in cls.__bases__ or not issubclass(cls, _ParamScheduler):
        return
    init = super(mixin, cls).__init__

    @functools.wraps(init)
    def __init__(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        mixin.__init__(self, optimizer, *args, **kwargs)

    signature = inspect.signature(init)
    parameters = [p for p in signature.parameters.values() if p.name != "param_name"]
    __init__.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[method-assign]
