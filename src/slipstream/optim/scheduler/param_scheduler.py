"""Schedulers for any option of the parameter groups.

In the formulas, t is the scheduler's step (0 at `begin`), T is its last step, and v is the current value. Each class
also accepts the arguments of `_ParamScheduler` (`begin`, `end`, `last_step`, `by_epoch`, `verbose`).
"""

from __future__ import annotations

import math
import types
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal

from slipstream.errors import ConfigError, did_you_mean
from slipstream.optim.scheduler.base import INF, _ParamScheduler, check_int
from slipstream.registry import PARAM_SCHEDULERS
from slipstream.typecheck import NonNegative, NonNegativeInt, Positive, PositiveInt, Probability, Rule, check

__all__ = [
    "INF", "ConstantParamScheduler", "CosineAnnealingParamScheduler", "CosineRestartParamScheduler",
    "ExponentialParamScheduler", "LinearParamScheduler", "MultiStepParamScheduler", "OneCycleParamScheduler",
    "PolyParamScheduler", "ReduceOnPlateauParamScheduler", "StepParamScheduler", "_ParamScheduler",
]  # fmt: skip


_Fraction = Annotated[float, Rule(lambda value: 0 < value <= 1, "above 0 and at most 1")]
_Reduction = Annotated[float, Rule(lambda value: 0 < value < 1, "above 0 and below 1")]
_Steps = Annotated[list[NonNegativeInt], Rule(lambda steps: len(steps) > 0, "with at least one step")]


def _sequence(kind: Any, length: int) -> Any:
    """Return the type of a sequence with `length` elements."""
    return types.GenericAlias(tuple, (kind,) * length)


def _require_end(end: int | None, alternatives: str = "") -> None:
    """Raise a `ConfigError` unless `end` or one of its `alternatives` has been specified."""
    if end is None or end == INF:
        raise ConfigError(f"{alternatives}end must be specified; otherwise, the value would never change")


@PARAM_SCHEDULERS.register_module()
class ConstantParamScheduler(_ParamScheduler):
    """Multiply the value by `factor` at `begin`, and divide it by `factor` at the last step before `end`."""

    def __init__(self, optimizer: Any, param_name: str, factor: float = 1.0 / 3, **kwargs: Any) -> None:
        self.factor = check(factor, _Fraction, "factor")
        super().__init__(optimizer, param_name, **kwargs)

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
        **kwargs: Any,
    ) -> None:
        self.start_factor = check(start_factor, _Fraction, "start_factor")
        self.end_factor = check(end_factor, Probability, "end_factor")
        _require_end(kwargs.get("end"))
        super().__init__(optimizer, param_name, **kwargs)

    def _next(self, value: float, base: float) -> float:
        if self.last_step == 0:
            return value * self.start_factor
        slope = self.end_factor - self.start_factor
        previous = self.total_iters * self.start_factor + (self.last_step - 1) * slope
        return value * (1 + slope / previous)


@PARAM_SCHEDULERS.register_module()
class ExponentialParamScheduler(_ParamScheduler):
    """Multiply the value by `gamma` at every step after the first."""

    def __init__(self, optimizer: Any, param_name: str, gamma: float = 0.1, **kwargs: Any) -> None:
        self.gamma = check(gamma, Positive, "gamma")
        super().__init__(optimizer, param_name, **kwargs)

    def _next(self, value: float, base: float) -> float:
        return value if self.last_step == 0 else value * self.gamma


@PARAM_SCHEDULERS.register_module()
class StepParamScheduler(_ParamScheduler):
    """Multiply the value by `gamma` every `step_size` steps."""

    _step_arguments: ClassVar[tuple[str, ...]] = ("step_size",)

    def __init__(
        self, optimizer: Any, param_name: str, step_size: int, gamma: float = 0.1, **kwargs: Any
    ) -> None:
        self.step_size = check(step_size, PositiveInt, "step_size")
        self.gamma = check(gamma, Positive, "gamma")
        super().__init__(optimizer, param_name, **kwargs)

    def _next(self, value: float, base: float) -> float:
        return value if self.last_step == 0 or self.last_step % self.step_size else value * self.gamma


@PARAM_SCHEDULERS.register_module()
class MultiStepParamScheduler(_ParamScheduler):
    """Multiply the value by `gamma` at each milestone, which is a step counted from `begin`.

    A milestone that is listed twice is applied twice.
    """

    _step_arguments: ClassVar[tuple[str, ...]] = ("milestones",)

    def __init__(
        self, optimizer: Any, param_name: str, milestones: list[int], gamma: float = 0.1, **kwargs: Any
    ) -> None:
        self.milestones = dict(Counter(check(milestones, _Steps, "milestones")))
        self.gamma = check(gamma, Positive, "gamma")
        super().__init__(optimizer, param_name, **kwargs)

    def _next(self, value: float, base: float) -> float:
        times = self.milestones.get(self.last_step, 0)
        return value * self.gamma**times if times else value


@PARAM_SCHEDULERS.register_module()
class PolyParamScheduler(_ParamScheduler):
    """Decrease to `eta_min` at `end - 1` along (1 - t/T)^power.

    v <- (v - eta_min) (1 - 1 / (T - t + 1))^power + eta_min.
    """

    _length_arguments: ClassVar[tuple[str, ...]] = ("end",)

    def __init__(
        self, optimizer: Any, param_name: str, eta_min: float = 0, power: float = 1.0, **kwargs: Any
    ) -> None:
        self.eta_min = check(eta_min, NonNegative, "eta_min")
        self.power = check(power, Positive, "power")
        _require_end(kwargs.get("end"))
        super().__init__(optimizer, param_name, **kwargs)

    def _next(self, value: float, base: float) -> float:
        if self.last_step == 0:
            return value
        left: float = (1 - 1 / (self.total_iters - self.last_step + 1)) ** self.power
        return (value - self.eta_min) * left + self.eta_min


class _CosineParamScheduler(_ParamScheduler):
    """Base class for cosine schedulers, whose lower bound is absolute or relative to the initial value."""

    def _set_lower_bound(self, eta_min: float | None, eta_min_ratio: float | None) -> None:
        if eta_min is not None and eta_min_ratio is not None:
            raise ConfigError("specify eta_min or eta_min_ratio, not both")
        if eta_min is None and eta_min_ratio is None:
            eta_min = 0.0
        self.eta_min = check(eta_min, NonNegative | None, "eta_min")
        self.eta_min_ratio = check(eta_min_ratio, NonNegative | None, "eta_min_ratio")

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
        eta_min_ratio: float | None = None,
        **kwargs: Any,
    ) -> None:
        if T_max is None:
            _require_end(kwargs.get("end"), "T_max or ")
            T_max = kwargs["end"] - kwargs.get("begin", 0)  # noqa: N806
        else:
            check_int("T_max", T_max, 1)
        self.T_max = T_max
        self._set_lower_bound(eta_min, eta_min_ratio)
        super().__init__(optimizer, param_name, **kwargs)

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
        **kwargs: Any,
    ) -> None:
        check(periods, Annotated[list[PositiveInt], Rule(lambda steps: len(steps) > 0, "")], "periods")
        check(restart_weights, _sequence(NonNegative, len(periods)), "restart_weights")
        self.periods = list(periods)
        self.restart_weights = list(restart_weights)
        self.cumulative_periods = list(accumulate(periods))
        self._set_lower_bound(eta_min, eta_min_ratio)
        super().__init__(optimizer, param_name, **kwargs)

    def _next(self, value: float, base: float) -> float:
        index = bisect_right(self.cumulative_periods, self.last_step)
        if index == len(self.periods):
            return value
        step = self.last_step - (self.cumulative_periods[index] - self.periods[index])
        if step == 0:
            return base * self.restart_weights[index]
        return self._fall(value, self._lower_bound(base), step, self.periods[index])


@PARAM_SCHEDULERS.register_module()
class OneCycleParamScheduler(_ParamScheduler):
    """Increase from `eta_max / div_factor` to `eta_max`, then decrease to `eta_max / div_factor / final_div_factor`.

    See "Super-Convergence" (arXiv:1708.07120). This scheduler sets absolute values instead of scaling the current
    values, so it cannot be chained after a warm-up. The value does not change after `total_steps` steps.

    Args:
        optimizer: for this and the other common arguments, see `_ParamScheduler`.
        param_name: must be `lr`.
        eta_max: peak value, either one number for all groups or one for each group.
        total_steps: length of the cycle in steps; `end - begin` by default.
        pct_start: fraction of the cycle during which the value increases.
        anneal_strategy: shape of each phase, `cos` (cosine) or `linear`.
        div_factor: ratio of the peak value to the start value.
        final_div_factor: ratio of the start value to the final value.
        three_phase: whether to insert a phase after the first one. It has the same length as the first phase, and
            decreases the value from the peak value to the start value.
    """

    _length_arguments: ClassVar[tuple[str, ...]] = ("end", "total_steps")
    _step_arguments: ClassVar[tuple[str, ...]] = ("total_steps",)

    def __init__(
        self,
        optimizer: Any,
        param_name: str,
        eta_max: float | Sequence[float],
        total_steps: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        **kwargs: Any,
    ) -> None:
        check(param_name, Literal["lr"], "param_name")
        if total_steps is None:
            _require_end(kwargs.get("end"), "total_steps or ")
            total_steps = kwargs["end"] - kwargs.get("begin", 0)
        check_int("total_steps", total_steps, 1)
        self.total_steps: int = total_steps
        check(pct_start, Probability, "pct_start")
        if three_phase and pct_start > 0.5:
            raise ConfigError(f"must be at most 0.5 with three_phase, not {pct_start}", "pct_start")
        check(div_factor, Positive, "div_factor")
        check(final_div_factor, Positive, "final_div_factor")
        self.anneal_strategy = check(anneal_strategy, Literal["cos", "linear"], "anneal_strategy")
        self._peaks = self._peak_of_each_group(optimizer, eta_max)
        # For each phase: its last step, and the ratios of its first and last values to the peak value.
        low, final = 1 / div_factor, 1 / (div_factor * final_div_factor)
        turn = pct_start * self.total_steps - 1
        later_phases = [(2 * turn, 1.0, low), (self.total_steps - 1.0, low, final)]
        self._phases = [
            (turn, low, 1.0),
            *(later_phases if three_phase else [(self.total_steps - 1.0, 1.0, final)]),
        ]
        if kwargs.get("last_step", -1) == -1:
            for group, peak in zip(optimizer.param_groups, self._peaks, strict=True):
                group["initial_lr"] = peak * low
        super().__init__(optimizer, param_name, **kwargs)

    @staticmethod
    def _peak_of_each_group(optimizer: Any, eta_max: Any) -> list[float]:
        count = len(optimizer.param_groups)
        peaks = list(eta_max) if isinstance(eta_max, list | tuple) else [eta_max] * count
        check(peaks, _sequence(Positive, count), "eta_max")
        return peaks

    def _get_value(self) -> list[float]:
        if self.last_step >= self.total_steps:
            return self._values.read()
        start = 0.0
        for stop, first, last in self._phases:  # noqa: B007
            if self.last_step <= stop:
                break
            start = stop
        # A phase of length zero is already complete.
        progress = (self.last_step - start) / (stop - start) if stop > start else 1.0
        if self.anneal_strategy == "cos":
            progress = (1 - math.cos(math.pi * progress)) / 2
        factor = first + (last - first) * progress
        return [peak * factor for peak in self._peaks]


@PARAM_SCHEDULERS.register_module()
class ReduceOnPlateauParamScheduler(_ParamScheduler):
    """Multiply the value by `factor` when `monitor` has not improved for more than `patience` validation runs.

    `step()` counts an epoch; `step(metrics)` processes the results of a validation run.

    Args:
        optimizer: for this and the other common arguments, see `_ParamScheduler`.
        param_name: name of the option to reduce.
        monitor: key of the metric in `metrics`.
        rule: `less` if smaller values are better, `greater` if larger values are better.
        factor: factor by which the value is multiplied in each reduction; less than 1.
        patience: number of consecutive validation runs without improvement that are tolerated before a reduction.
        threshold: minimum improvement.
        threshold_rule: `rel` if the threshold is relative to the best value, `abs` if it is absolute.
        cooldown: number of validation runs after a reduction that are not counted as runs without improvement.
        min_value: lower bound, either one number for all groups or one for each group.
        eps: reductions of at most this amount are skipped.
        by_epoch: must be True.
    """

    need_val_args: ClassVar[bool] = True
    _state_keys: ClassVar[tuple[str, ...]] = (
        *_ParamScheduler._state_keys,
        "best",
        "num_bad_epochs",
        "cooldown_counter",
    )

    def __init__(
        self,
        optimizer: Any,
        param_name: str,
        monitor: str = "loss",
        rule: Literal["less", "greater"] = "less",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_rule: Literal["rel", "abs"] = "rel",
        cooldown: int = 0,
        min_value: float | Sequence[float] = 0.0,
        eps: float = 1e-8,
        **kwargs: Any,
    ) -> None:
        check(kwargs.get("by_epoch", True), Literal[True], "by_epoch")
        self.monitor = check(monitor, str, "monitor")
        self.rule = check(rule, Literal["less", "greater"], "rule")
        self.factor = check(factor, _Reduction, "factor")
        self.patience = check(patience, NonNegativeInt, "patience")
        self.threshold = check(threshold, NonNegative, "threshold")
        self.threshold_rule = check(threshold_rule, Literal["rel", "abs"], "threshold_rule")
        self.cooldown = check(cooldown, NonNegativeInt, "cooldown")
        self.eps = check(eps, NonNegative, "eps")
        self.best = math.inf if rule == "less" else -math.inf
        self.num_bad_epochs = self.cooldown_counter = 0
        count = len(optimizer.param_groups)
        lows: Any = min_value if isinstance(min_value, list | tuple) else [min_value] * count
        check(lows, _sequence(float, count), "min_value")
        self.min_values: list[float] = list(lows)
        super().__init__(optimizer, param_name, **kwargs)

    @classmethod
    def build_iter_from_epoch(cls, *args: Any, **kwargs: Any) -> ReduceOnPlateauParamScheduler:
        """Raise `ConfigError`, because this scheduler counts validation runs instead of iterations."""
        raise ConfigError(f"{cls.__name__} does not support convert_to_iter_based; remove it")

    def step(self, metrics: Mapping[str, Any] | None = None) -> None:
        """Count an epoch, or process the `metrics` of a validation run (numbers or 0-dim tensors).

        Raises:
            ConfigError: `metrics` does not contain `monitor`.
        """
        if metrics is None:
            self._global_step += 1
        elif self.begin <= self._global_step < self.end:
            self.last_step += 1
            if self.monitor not in metrics:
                hint = did_you_mean(self.monitor, metrics)
                raise ConfigError(
                    f"monitor '{self.monitor}' is not among the metrics {sorted(metrics)}{hint}"
                )
            self._evaluate(float(metrics[self.monitor]))
        self._last_value = self._values.read()

    def _evaluate(self, metric: float) -> None:
        if self._is_better(metric):
            self.best = metric
            self.num_bad_epochs = 0
        else:
            self.num_bad_epochs += 1
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            self.num_bad_epochs = 0
        if self.num_bad_epochs > self.patience:
            self._write(self._get_value())
            self.cooldown_counter = self.cooldown
            self.num_bad_epochs = 0

    def _get_value(self) -> list[float]:
        values = self._values.read()
        reduced = [max(v * self.factor, low) for v, low in zip(values, self.min_values, strict=True)]
        return [new if old - new > self.eps else old for old, new in zip(values, reduced, strict=True)]

    def _is_better(self, metric: float) -> bool:
        sign = -1 if self.rule == "less" else 1
        if self.threshold_rule == "abs":
            return sign * metric > sign * self.best + self.threshold
        return sign * metric > sign * self.best * (1 + sign * self.threshold)
