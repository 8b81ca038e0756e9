"""Cosine schedulers with and without restarts."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate
from typing import Any, ClassVar

from slipstream.errors import ConfigError
from slipstream.optim.scheduler.base import _ParamScheduler
from slipstream.optim.scheduler.checks import INF, check_int, check_steps, require, require_end
from slipstream.registry import PARAM_SCHEDULERS
from slipstream.typecheck import NonNegative, matches

__all__ = ["CosineAnnealingParamScheduler", "CosineRestartParamScheduler"]


class _CosineParamScheduler(_ParamScheduler):
    """Base class for cosine schedulers, whose lower bound is absolute or relative to the initial value."""

    eta_min: float | None
    eta_min_ratio: float | None

    def _set_lower_bound(self, eta_min: float | None, eta_min_ratio: float | None) -> None:
        if eta_min is not None and eta_min_ratio is not None:
            raise ConfigError("specify eta_min or eta_min_ratio, not both")
        for name, value in (("eta_min", eta_min), ("eta_min_ratio", eta_min_ratio)):
            require(value is None or matches(value, NonNegative), name, "a non-negative number", value)
        self.eta_min = 0.0 if eta_min is None and eta_min_ratio is None else eta_min
        self.eta_min_ratio = eta_min_ratio

    def _lower_bound(self, base: float) -> float:
        return base * self.eta_min_ratio if self.eta_min is None else self.eta_min  # type: ignore[operator]

    @staticmethod
    def _fall(value: float, low: float, step: int, period: int) -> float:
        ratio = (1 + math.cos(math.pi * step / period)) / (1 + math.cos(math.pi * (step - 1) / period))
        return ratio * (value - low) + low


@PARAM_SCHEDULERS.register_module()
class CosineAnnealingParamScheduler(_CosineParamScheduler):
    """Decrease to `eta_min` along a half cosine of `T_max` steps (default: `end - begin`), then increase again.

    The value at step t, counted from `begin`, is eta_min + (v0 - eta_min) (1 + cos(pi t / T_max)) / 2, where v0 is the
    value at `begin` (SGDR, arXiv:1608.03983, without restarts). Instead of `eta_min`, `eta_min_ratio` can specify the
    lower bound relative to the initial value of each group.
    """

    _length_arguments: ClassVar[tuple[str, ...]] = ("end", "T_max")
    _step_arguments: ClassVar[tuple[str, ...]] = ("T_max",)

    def __init__(
        self,
        optimizer: Any,
        param_name: str,
        T_max: int | None = None,  # noqa: N803
        eta_min: float | None = None,
        begin: int = 0,
        end: int = INF,
        last_step: int = -1,
        by_epoch: bool = True,
        verbose: bool = False,
        eta_min_ratio: float | None = None,
    ) -> None:
        if T_max is None:
            require_end(end, "T_max or ")
            T_max = end - begin  # noqa: N806
        else:
            check_int("T_max", T_max, 1)
        self.T_max = T_max
        self._set_lower_bound(eta_min, eta_min_ratio)
        super().__init__(optimizer, param_name, begin, end, last_step, by_epoch, verbose)

    def _next(self, value: float, base: float) -> float:
        low = self._lower_bound(base)
        if self.last_step == 0:
            return value
        after_minimum = (self.last_step - 1 - self.T_max) % (2 * self.T_max) == 0
        if after_minimum:  # `_fall` would divide by zero
            return value + (base - low) * (1 - math.cos(math.pi / self.T_max)) / 2
        return self._fall(value, low, self.last_step, self.T_max)


@PARAM_SCHEDULERS.register_module()
class CosineRestartParamScheduler(_CosineParamScheduler):
    """Decrease along a half cosine in each period (SGDR, arXiv:1608.03983).

    Period i starts at `restart_weights[i]` times the initial value. The value does not change after the last period.
    The lower bound is specified as in `CosineAnnealingParamScheduler`.
    """

    _step_arguments: ClassVar[tuple[str, ...]] = ("periods",)

    def __init__(
        self,
        optimizer: Any,
        param_name: str,
        periods: list[int],
        restart_weights: list[float] = (1,),  # type: ignore[assignment]
        eta_min: float | None = None,
        eta_min_ratio: float | None = None,
        begin: int = 0,
        end: int = INF,
        last_step: int = -1,
        by_epoch: bool = True,
        verbose: bool = False,
    ) -> None:
        check_steps("periods", periods, 1)
        require(
            len(restart_weights) == len(periods) and all(matches(w, NonNegative) for w in restart_weights),
            "restart_weights",
            f"one non-negative number for each of the {len(periods)} periods",
            restart_weights,
        )
        self.periods = list(periods)
        self.restart_weights = list(restart_weights)
        self.cumulative_periods = list(accumulate(periods))
        self._set_lower_bound(eta_min, eta_min_ratio)
        super().__init__(optimizer, param_name, begin, end, last_step, by_epoch, verbose)

    def _next(self, value: float, base: float) -> float:
        index = bisect_right(self.cumulative_periods, self.last_step)
        if index == len(self.periods):
            return value
        step = self.last_step - (self.cumulative_periods[index] - self.periods[index])
        if step == 0:
            return base * self.restart_weights[index]
        return self._fall(value, self._lower_bound(base), step, self.periods[index])
