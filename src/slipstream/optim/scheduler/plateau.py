"""A scheduler that reduces a value when a metric stops improving."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from slipstream.errors import ConfigError, did_you_mean
from slipstream.optim.scheduler.base import _ParamScheduler
from slipstream.optim.scheduler.checks import INF, check_int, is_number, require
from slipstream.registry import PARAM_SCHEDULERS

__all__ = ["ReduceOnPlateauParamScheduler"]


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
        begin: int = 0,
        end: int = INF,
        last_step: int = -1,
        by_epoch: bool = True,
        verbose: bool = False,
    ) -> None:
        if by_epoch is not True:
            raise ConfigError(
                f"by_epoch must be True, not {by_epoch!r}, because this scheduler counts validation runs"
            )
        require(rule in ("less", "greater"), "rule", "'less' or 'greater'", rule)
        require(threshold_rule in ("rel", "abs"), "threshold_rule", "'rel' or 'abs'", threshold_rule)
        require(is_number(factor) and 0 < factor < 1, "factor", "above 0 and below 1", factor)
        for name, number in (("threshold", threshold), ("eps", eps)):
            require(is_number(number) and number >= 0, name, "a non-negative number", number)
        check_int("patience", patience, 0)
        check_int("cooldown", cooldown, 0)
        self.monitor, self.rule, self.factor, self.eps = monitor, rule, factor, eps
        self.threshold, self.threshold_rule = threshold, threshold_rule
        self.patience, self.cooldown = patience, cooldown
        self.best = math.inf if rule == "less" else -math.inf
        self.num_bad_epochs = self.cooldown_counter = 0
        count = len(optimizer.param_groups)
        lows: Any = min_value if isinstance(min_value, list | tuple) else [min_value] * count
        self.min_values: list[float] = list(lows)
        fits = len(self.min_values) == count and all(is_number(low) for low in self.min_values)
        require(fits, "min_value", f"a number, or one for each of the {count} parameter groups", min_value)
        super().__init__(optimizer, param_name, begin, end, last_step, by_epoch, verbose)

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
