"""Schedulers whose values depend only on the step.

In the formulas, t is the scheduler's step (0 at `begin`), T is its last step, and v is the current value.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from slipstream.optim.scheduler.base import _ParamScheduler
from slipstream.optim.scheduler.checks import (
    INF,
    check_gamma,
    check_int,
    check_steps,
    is_number,
    require,
    require_end,
)
from slipstream.optim.scheduler.cosine import CosineAnnealingParamScheduler, CosineRestartParamScheduler
from slipstream.optim.scheduler.one_cycle import OneCycleParamScheduler
from slipstream.optim.scheduler.plateau import ReduceOnPlateauParamScheduler
from slipstream.registry import PARAM_SCHEDULERS
from slipstream.typecheck import NonNegative, matches

__all__ = [
    "INF",
    "ConstantParamScheduler",
    "CosineAnnealingParamScheduler",
    "CosineRestartParamScheduler",
    "ExponentialParamScheduler",
    "LinearParamScheduler",
    "MultiStepParamScheduler",
    "OneCycleParamScheduler",
    "PolyParamScheduler",
    "ReduceOnPlateauParamScheduler",
    "StepParamScheduler",
    "_ParamScheduler",
]


@PARAM_SCHEDULERS.register_module()
class ConstantParamScheduler(_ParamScheduler):
    """Multiply the value by `factor` at `begin`, and divide it by `factor` at the last step before `end`."""

    def __init__(
        self,
        optimizer: Any,
        param_name: str,
        factor: float = 1.0 / 3,
        begin: int = 0,
        end: int = INF,
        last_step: int = -1,
        by_epoch: bool = True,
        verbose: bool = False,
    ) -> None:
        require(is_number(factor) and 0 < factor <= 1, "factor", "above 0 and at most 1", factor)
        self.factor = factor
        super().__init__(optimizer, param_name, begin, end, last_step, by_epoch, verbose)

    def _next(self, value: float, base: float) -> float:
        if self.last_step == 0:
            return value * self.factor
        return value / self.factor if self.last_step == self.total_iters else value


@PARAM_SCHEDULERS.register_module()
class LinearParamScheduler(_ParamScheduler):
    """Multiply the value by a factor that changes linearly from `start_factor` at `begin` to `end_factor` at `end - 1`.

    v <- v (1 + d / (T s + (t - 1) d)), where s = start_factor and d = end_factor - start_factor.
    """

    _length_arguments: ClassVar[tuple[str, ...]] = ("end",)

    def __init__(
        self,
        optimizer: Any,
        param_name: str,
        start_factor: float = 1.0 / 3,
        end_factor: float = 1.0,
        begin: int = 0,
        end: int = INF,
        last_step: int = -1,
        by_epoch: bool = True,
        verbose: bool = False,
    ) -> None:
        require(
            is_number(start_factor) and 0 < start_factor <= 1,
            "start_factor",
            "above 0 (because each value is a multiple of the previous value) and at most 1",
            start_factor,
        )
        require(is_number(end_factor) and 0 <= end_factor <= 1, "end_factor", "from 0 to 1", end_factor)
        require_end(end)
        self.start_factor = start_factor
        self.end_factor = end_factor
        super().__init__(optimizer, param_name, begin, end, last_step, by_epoch, verbose)

    def _next(self, value: float, base: float) -> float:
        if self.last_step == 0:
            return value * self.start_factor
        slope = self.end_factor - self.start_factor
        previous = self.total_iters * self.start_factor + (self.last_step - 1) * slope
        return value * (1 + slope / previous)


@PARAM_SCHEDULERS.register_module()
class ExponentialParamScheduler(_ParamScheduler):
    """Multiply the value by `gamma` at every step after the first."""

    def __init__(
        self,
        optimizer: Any,
        param_name: str,
        gamma: float = 0.1,
        begin: int = 0,
        end: int = INF,
        last_step: int = -1,
        by_epoch: bool = True,
        verbose: bool = False,
    ) -> None:
        check_gamma(gamma)
        self.gamma = gamma
        super().__init__(optimizer, param_name, begin, end, last_step, by_epoch, verbose)

    def _next(self, value: float, base: float) -> float:
        return value if self.last_step == 0 else value * self.gamma


@PARAM_SCHEDULERS.register_module()
class StepParamScheduler(_ParamScheduler):
    """Multiply the value by `gamma` every `step_size` steps."""

    _step_arguments: ClassVar[tuple[str, ...]] = ("step_size",)

    def __init__(
        self,
        optimizer: Any,
        param_name: str,
        step_size: int,
        gamma: float = 0.1,
        begin: int = 0,
        end: int = INF,
        last_step: int = -1,
        by_epoch: bool = True,
        verbose: bool = False,
    ) -> None:
        check_int("step_size", step_size, 1)
        check_gamma(gamma)
        self.step_size = step_size
        self.gamma = gamma
        super().__init__(optimizer, param_name, begin, end, last_step, by_epoch, verbose)

    def _next(self, value: float, base: float) -> float:
        return value if self.last_step == 0 or self.last_step % self.step_size else value * self.gamma


@PARAM_SCHEDULERS.register_module()
class MultiStepParamScheduler(_ParamScheduler):
    """Multiply the value by `gamma` at each milestone, which is a step counted from `begin`.

    A milestone that is listed twice is applied twice.
    """

    _step_arguments: ClassVar[tuple[str, ...]] = ("milestones",)

    def __init__(
        self,
        optimizer: Any,
        param_name: str,
        milestones: list[int],
        gamma: float = 0.1,
        begin: int = 0,
        end: int = INF,
        last_step: int = -1,
        by_epoch: bool = True,
        verbose: bool = False,
    ) -> None:
        check_steps("milestones", milestones, 0)
        check_gamma(gamma)
        self.milestones = Counter(milestones)
        self.gamma = gamma
        super().__init__(optimizer, param_name, begin, end, last_step, by_epoch, verbose)

    def _next(self, value: float, base: float) -> float:
        times = self.milestones[self.last_step]
        return value * self.gamma**times if times else value


@PARAM_SCHEDULERS.register_module()
class PolyParamScheduler(_ParamScheduler):
    """Decrease to `eta_min` at `end - 1` along (1 - t/T)^power.

    v <- (v - eta_min) (1 - 1 / (T - t + 1))^power + eta_min.
    """

    _length_arguments: ClassVar[tuple[str, ...]] = ("end",)

    def __init__(
        self,
        optimizer: Any,
        param_name: str,
        eta_min: float = 0,
        power: float = 1.0,
        begin: int = 0,
        end: int = INF,
        last_step: int = -1,
        by_epoch: bool = True,
        verbose: bool = False,
    ) -> None:
        require(matches(eta_min, NonNegative), "eta_min", "a non-negative number", eta_min)
        require(is_number(power) and power > 0, "power", "a positive number", power)
        require_end(end)
        self.eta_min = eta_min
        self.power = power
        super().__init__(optimizer, param_name, begin, end, last_step, by_epoch, verbose)

    def _next(self, value: float, base: float) -> float:
        if self.last_step == 0:
            return value
        left: float = (1 - 1 / (self.total_iters - self.last_step + 1)) ** self.power
        return (value - self.eta_min) * left + self.eta_min
