"""Learning rate schedulers, which are the `...ParamScheduler` classes without the `param_name` argument."""

from __future__ import annotations

from slipstream.optim.scheduler import param_scheduler as base
from slipstream.optim.scheduler.base import LRSchedulerMixin
from slipstream.registry import PARAM_SCHEDULERS

__all__ = [
    "ConstantLR", "CosineAnnealingLR", "CosineRestartLR", "ExponentialLR", "LRSchedulerMixin", "LinearLR",
    "MultiStepLR", "OneCycleLR", "PolyLR", "ReduceOnPlateauLR", "StepLR",
]  # fmt: skip


@PARAM_SCHEDULERS.register_module()
class ConstantLR(LRSchedulerMixin, base.ConstantParamScheduler):
    """`ConstantParamScheduler` for the learning rate."""


@PARAM_SCHEDULERS.register_module()
class CosineAnnealingLR(LRSchedulerMixin, base.CosineAnnealingParamScheduler):
    """`CosineAnnealingParamScheduler` for the learning rate."""


@PARAM_SCHEDULERS.register_module()
class CosineRestartLR(LRSchedulerMixin, base.CosineRestartParamScheduler):
    """`CosineRestartParamScheduler` for the learning rate."""


@PARAM_SCHEDULERS.register_module()
class ExponentialLR(LRSchedulerMixin, base.ExponentialParamScheduler):
    """`ExponentialParamScheduler` for the learning rate."""


@PARAM_SCHEDULERS.register_module()
class LinearLR(LRSchedulerMixin, base.LinearParamScheduler):
    """`LinearParamScheduler` for the learning rate."""


@PARAM_SCHEDULERS.register_module()
class MultiStepLR(LRSchedulerMixin, base.MultiStepParamScheduler):
    """`MultiStepParamScheduler` for the learning rate."""


@PARAM_SCHEDULERS.register_module()
class OneCycleLR(LRSchedulerMixin, base.OneCycleParamScheduler):
    """`OneCycleParamScheduler` for the learning rate."""


@PARAM_SCHEDULERS.register_module()
class PolyLR(LRSchedulerMixin, base.PolyParamScheduler):
    """`PolyParamScheduler` for the learning rate."""


@PARAM_SCHEDULERS.register_module()
class ReduceOnPlateauLR(LRSchedulerMixin, base.ReduceOnPlateauParamScheduler):
    """`ReduceOnPlateauParamScheduler` for the learning rate."""


@PARAM_SCHEDULERS.register_module()
class StepLR(LRSchedulerMixin, base.StepParamScheduler):
    """`StepParamScheduler` for the learning rate."""
