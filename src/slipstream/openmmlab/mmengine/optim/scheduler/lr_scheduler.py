"""Learning rate schedulers whose state includes their arguments, as in MMEngine."""

from __future__ import annotations

import slipstream.optim.scheduler.lr_scheduler as own
from slipstream.openmmlab.mmengine.optim.scheduler.param_scheduler import (
    ConstantParamScheduler,
    CosineAnnealingParamScheduler,
    CosineRestartParamScheduler,
    ExponentialParamScheduler,
    LinearParamScheduler,
    MultiStepParamScheduler,
    OneCycleParamScheduler,
    PolyParamScheduler,
    ReduceOnPlateauParamScheduler,
    StepParamScheduler,
)
from slipstream.openmmlab.mmengine.registry import PARAM_SCHEDULERS
from slipstream.optim.scheduler.mixins import LRSchedulerMixin

__all__ = [
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineRestartLR",
    "ExponentialLR",
    "LRSchedulerMixin",
    "LinearLR",
    "MultiStepLR",
    "OneCycleLR",
    "PolyLR",
    "ReduceOnPlateauLR",
    "StepLR",
]


@PARAM_SCHEDULERS.register_module()
class ConstantLR(ConstantParamScheduler, own.ConstantLR):
    """See `slipstream.optim.scheduler.ConstantLR`."""


@PARAM_SCHEDULERS.register_module()
class CosineAnnealingLR(CosineAnnealingParamScheduler, own.CosineAnnealingLR):
    """See `slipstream.optim.scheduler.CosineAnnealingLR`."""


@PARAM_SCHEDULERS.register_module()
class CosineRestartLR(CosineRestartParamScheduler, own.CosineRestartLR):
    """See `slipstream.optim.scheduler.CosineRestartLR`."""


@PARAM_SCHEDULERS.register_module()
class ExponentialLR(ExponentialParamScheduler, own.ExponentialLR):
    """See `slipstream.optim.scheduler.ExponentialLR`."""


@PARAM_SCHEDULERS.register_module()
class LinearLR(LinearParamScheduler, own.LinearLR):
    """See `slipstream.optim.scheduler.LinearLR`."""


@PARAM_SCHEDULERS.register_module()
class MultiStepLR(MultiStepParamScheduler, own.MultiStepLR):
    """See `slipstream.optim.scheduler.MultiStepLR`."""


@PARAM_SCHEDULERS.register_module()
class OneCycleLR(OneCycleParamScheduler, own.OneCycleLR):
    """See `slipstream.optim.scheduler.OneCycleLR`."""


@PARAM_SCHEDULERS.register_module()
class PolyLR(PolyParamScheduler, own.PolyLR):
    """See `slipstream.optim.scheduler.PolyLR`."""


@PARAM_SCHEDULERS.register_module()
class ReduceOnPlateauLR(ReduceOnPlateauParamScheduler, own.ReduceOnPlateauLR):
    """See `slipstream.optim.scheduler.ReduceOnPlateauLR`."""


@PARAM_SCHEDULERS.register_module()
class StepLR(StepParamScheduler, own.StepLR):
    """See `slipstream.optim.scheduler.StepLR`."""
