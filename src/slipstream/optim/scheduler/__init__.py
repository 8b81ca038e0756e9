"""Schedulers for the learning rate, the momentum and other options of parameter groups."""

from slipstream.optim.scheduler import lr_scheduler, momentum_scheduler, param_scheduler
from slipstream.optim.scheduler.build import (
    TorchSchedulerAdapter,
    all_schedulers,
    build_param_scheduler,
    last_change,
)
from slipstream.optim.scheduler.lr_scheduler import *  # noqa: F403
from slipstream.optim.scheduler.momentum_scheduler import *  # noqa: F403
from slipstream.optim.scheduler.param_scheduler import *  # noqa: F403

__all__ = ["TorchSchedulerAdapter", "all_schedulers", "build_param_scheduler", "last_change"]
__all__ += lr_scheduler.__all__
__all__ += momentum_scheduler.__all__
__all__ += param_scheduler.__all__
