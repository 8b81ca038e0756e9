"""Momentum schedulers whose state includes their arguments, as in MMEngine."""

from __future__ import annotations

import slipstream.optim.scheduler.momentum_scheduler as own
from slipstream.openmmlab.mmengine.optim.scheduler.param_scheduler import (
    ConstantParamScheduler,
    CosineAnnealingParamScheduler,
    CosineRestartParamScheduler,
    ExponentialParamScheduler,
    LinearParamScheduler,
    MultiStepParamScheduler,
    PolyParamScheduler,
    ReduceOnPlateauParamScheduler,
    StepParamScheduler,
)
from slipstream.openmmlab.mmengine.registry import PARAM_SCHEDULERS
from slipstream.optim.scheduler.mixins import MomentumSchedulerMixin

__all__ = [
    "ConstantMomentum",
    "CosineAnnealingMomentum",
    "CosineRestartMomentum",
    "ExponentialMomentum",
    "LinearMomentum",
    "MomentumSchedulerMixin",
    "MultiStepMomentum",
    "PolyMomentum",
    "ReduceOnPlateauMomentum",
    "StepMomentum",
]


@PARAM_SCHEDULERS.register_module()
class ConstantMomentum(ConstantParamScheduler, own.ConstantMomentum):
    """See `slipstream.optim.scheduler.ConstantMomentum`."""


@PARAM_SCHEDULERS.register_module()
class CosineAnnealingMomentum(CosineAnnealingParamScheduler, own.CosineAnnealingMomentum):
    """See `slipstream.optim.scheduler.CosineAnnealingMomentum`."""


@PARAM_SCHEDULERS.register_module()
class CosineRestartMomentum(CosineRestartParamScheduler, own.CosineRestartMomentum):
    """See `slipstream.optim.scheduler.CosineRestartMomentum`."""


@PARAM_SCHEDULERS.register_module()
class ExponentialMomentum(ExponentialParamScheduler, own.ExponentialMomentum):
    """See `slipstream.optim.scheduler.ExponentialMomentum`."""


@PARAM_SCHEDULERS.register_module()
class LinearMomentum(LinearParamScheduler, own.LinearMomentum):
    """See `slipstream.optim.scheduler.LinearMomentum`."""


@PARAM_SCHEDULERS.register_module()
class MultiStepMomentum(MultiStepParamScheduler, own.MultiStepMomentum):
    """See `slipstream.optim.scheduler.MultiStepMomentum`."""


@PARAM_SCHEDULERS.register_module()
class PolyMomentum(PolyParamScheduler, own.PolyMomentum):
    """See `slipstream.optim.scheduler.PolyMomentum`."""


@PARAM_SCHEDULERS.register_module()
class ReduceOnPlateauMomentum(ReduceOnPlateauParamScheduler, own.ReduceOnPlateauMomentum):
    """See `slipstream.optim.scheduler.ReduceOnPlateauMomentum`."""


@PARAM_SCHEDULERS.register_module()
class StepMomentum(StepParamScheduler, own.StepMomentum):
    """See `slipstream.optim.scheduler.StepMomentum`."""
