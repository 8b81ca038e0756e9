"""Momentum schedulers, which are the `...ParamScheduler` classes without the `param_name` argument."""

from __future__ import annotations

from slipstream.optim.scheduler import param_scheduler as base
from slipstream.optim.scheduler.base import MomentumSchedulerMixin
from slipstream.registry import PARAM_SCHEDULERS

__all__ = [
    "ConstantMomentum", "CosineAnnealingMomentum", "CosineRestartMomentum", "ExponentialMomentum",
    "LinearMomentum", "MomentumSchedulerMixin", "MultiStepMomentum", "PolyMomentum",
    "ReduceOnPlateauMomentum", "StepMomentum",
]  # fmt: skip


@PARAM_SCHEDULERS.register_module()
class ConstantMomentum(MomentumSchedulerMixin, base.ConstantParamScheduler):
    """`ConstantParamScheduler` for the momentum."""


@PARAM_SCHEDULERS.register_module()
class CosineAnnealingMomentum(MomentumSchedulerMixin, base.CosineAnnealingParamScheduler):
    """`CosineAnnealingParamScheduler` for the momentum."""


@PARAM_SCHEDULERS.register_module()
class CosineRestartMomentum(MomentumSchedulerMixin, base.CosineRestartParamScheduler):
    """`CosineRestartParamScheduler` for the momentum."""


@PARAM_SCHEDULERS.register_module()
class ExponentialMomentum(MomentumSchedulerMixin, base.ExponentialParamScheduler):
    """`ExponentialParamScheduler` for the momentum."""


@PARAM_SCHEDULERS.register_module()
class LinearMomentum(MomentumSchedulerMixin, base.LinearParamScheduler):
    """`LinearParamScheduler` for the momentum."""


@PARAM_SCHEDULERS.register_module()
class MultiStepMomentum(MomentumSchedulerMixin, base.MultiStepParamScheduler):
    """`MultiStepParamScheduler` for the momentum."""


@PARAM_SCHEDULERS.register_module()
class PolyMomentum(MomentumSchedulerMixin, base.PolyParamScheduler):
    """`PolyParamScheduler` for the momentum."""


@PARAM_SCHEDULERS.register_module()
class ReduceOnPlateauMomentum(MomentumSchedulerMixin, base.ReduceOnPlateauParamScheduler):
    """`ReduceOnPlateauParamScheduler` for the momentum."""


@PARAM_SCHEDULERS.register_module()
class StepMomentum(MomentumSchedulerMixin, base.StepParamScheduler):
    """`StepParamScheduler` for the momentum."""
