"""One-cycle scheduler."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from slipstream.errors import ConfigError
from slipstream.optim.scheduler.base import _ParamScheduler
from slipstream.optim.scheduler.checks import INF, check_int, is_number, require
from slipstream.registry import PARAM_SCHEDULERS

__all__ = ["OneCycleParamScheduler"]


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
        begin: int = 0,
        end: int = INF,
        last_step: int = -1,
        by_epoch: bool = True,
        verbose: bool = False,
    ) -> None:
        require(param_name == "lr", "param_name", "'lr' for a one-cycle scheduler", param_name)
        if total_steps is None and end == INF:
            raise ConfigError("total_steps or end must be specified to determine the length of the cycle")
        if total_steps is not None:
            check_int("total_steps", total_steps, 1)
        self.total_steps = end - begin if total_steps is None else total_steps
        max_pct_start = 0.5 if three_phase else 1
        require(
            is_number(pct_start) and 0 <= pct_start <= max_pct_start,
            "pct_start",
            f"from 0 to {max_pct_start}",
            pct_start,
        )
        require(anneal_strategy in ("cos", "linear"), "anneal_strategy", "'cos' or 'linear'", anneal_strategy)
        for name, divisor in (("div_factor", div_factor), ("final_div_factor", final_div_factor)):
            require(is_number(divisor) and divisor > 0, name, "a positive number", divisor)
        self.anneal_strategy = anneal_strategy
        self._peaks = self._peak_of_each_group(optimizer, eta_max)
        # For each phase: its last step, and the ratios of its first and last values to the peak value.
        low, final = 1 / div_factor, 1 / (div_factor * final_div_factor)
        turn = pct_start * self.total_steps - 1
        later_phases = [(2 * turn, 1.0, low), (self.total_steps - 1.0, low, final)]
        self._phases = [
            (turn, low, 1.0),
            *(later_phases if three_phase else [(self.total_steps - 1.0, 1.0, final)]),
        ]
        if last_step == -1:
            for group, peak in zip(optimizer.param_groups, self._peaks, strict=True):
                group["initial_lr"] = peak * low
        super().__init__(optimizer, param_name, begin, end, last_step, by_epoch, verbose)

    @staticmethod
    def _peak_of_each_group(optimizer: Any, eta_max: Any) -> list[float]:
        count = len(optimizer.param_groups)
        peaks = list(eta_max) if isinstance(eta_max, list | tuple) else [eta_max] * count
        fits = len(peaks) == count and all(is_number(peak) and peak > 0 for peak in peaks)
        require(
            fits, "eta_max", f"a positive number, or one for each of the {count} parameter groups", eta_max
        )
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
