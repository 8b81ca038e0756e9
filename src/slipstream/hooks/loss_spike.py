"""Warn of losses far above the recent values."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from slipstream.errors import ConfigError, did_you_mean
from slipstream.hooks.hook import Hook
from slipstream.registry import HOOKS
from slipstream.typecheck import PositiveInt, check, matches

if TYPE_CHECKING:
    from slipstream.runner import Runner

# 1 / (0.75 quantile of the normal distribution). For normally distributed values, the standard deviation is the MAD
# times this factor.
_MAD_TO_STD = 1.4826
# The scale is at least this fraction of the median, so that rounding errors in a constant loss do not count as
# spikes.
_MIN_RELATIVE_SCALE = 0.01


@HOOKS.register_module()
class LossSpikeHook(Hook):
    """Warn if the loss rises far above its recent values.

    The loss of a step is a spike if it exceeds

        median + threshold * scale,  scale = max(1.4826 * MAD, 0.01 * |median|)

    where MAD is the median of the absolute deviations from the median, over the last `window` losses before the step.
    This rule is based on the modified z-score of B. Iglewicz and D. Hoaglin (*How to Detect and Handle Outliers*,
    1993). The hook checks this process's losses when the Runner reads them, at log intervals and before checkpoints, so
    it does not add a device synchronization to training steps.

    Args:
        monitor: name of the loss to monitor, as returned by the model.
        window: number of recent losses from which the median and the MAD are computed.
        threshold: factor that multiplies the scale in the formula above.
        min_history: minimum number of recorded losses before spikes can be detected; at most `window`.
        patience: number of consecutive steps whose loss must exceed the limit to count as a spike.
    """

    def __init__(
        self,
        monitor: str = "loss",
        window: PositiveInt = 200,
        threshold: float = 10.0,
        min_history: PositiveInt = 50,
        patience: PositiveInt = 1,
    ) -> None:
        for name, value in {"window": window, "min_history": min_history, "patience": patience}.items():
            check(value, PositiveInt, name)
        if min_history > window:
            raise ConfigError(f"must be at most window={window}, not {min_history}", "min_history")
        self.monitor, self.threshold = monitor, threshold
        self.min_history, self.patience = min_history, patience
        self._losses: deque[float] = deque(maxlen=window)
        self._above = 0  # number of consecutive losses above the limit
        self._pending: list[tuple[int, float]] = []
        self._names: set[str] = set()

    def before_train(self, runner: Runner) -> None:
        """Subscribe to the losses that are read for logging, and restore the recent losses of a resumed run."""
        self.release(runner)
        runner.meter.on_read.append(self._collect)
        saved = runner.message_hub.get_info(f"loss_spike/{self.monitor}")
        self._losses.clear()
        self._losses.extend(saved if matches(saved, list[float]) else ())
        self._above, self._pending = 0, []

    def _collect(self, steps: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        self._names.update(*(outputs for _, outputs in steps))
        self._pending += [(step, outputs[self.monitor]) for step, outputs in steps if self.monitor in outputs]

    def read_logs(self, runner: Runner) -> None:
        """Warn of spikes in the losses that were read.

        Raises:
            ConfigError: the model does not return the monitored loss.
        """
        if self._names and self.monitor not in self._names:
            hint = did_you_mean(self.monitor, self._names)
            raise self.config_error(
                f"the model does not return '{self.monitor}'{hint}; use one of {sorted(self._names)}",
                "monitor",
            )
        pending, self._pending = self._pending, []
        for step, loss in pending:
            limit = self._limit()
            self._above = self._above + 1 if loss > limit else 0
            if self._above == self.patience:
                runner.logger.warning(
                    f"'{self.monitor}' rose to {loss:.4g} at iteration {step}, above the limit of {limit:.4g} (the "
                    f"median of the last {len(self._losses)} losses is {np.median(self._losses):.4g}). Lower the "
                    "learning rate or clip the gradients (clip_grad=dict(max_norm=1.0)), or check the data"
                )
            if math.isfinite(loss):
                self._losses.append(loss)
        runner.message_hub.update_info(f"loss_spike/{self.monitor}", list(self._losses))

    def _limit(self) -> float:
        """Return the limit for the next loss, or infinity if there are too few losses or most of them are 0."""
        if len(self._losses) < self.min_history:
            return math.inf
        middle = float(np.median(self._losses))
        spread = float(np.median(np.abs(np.subtract(self._losses, middle))))
        scale = max(_MAD_TO_STD * spread, _MIN_RELATIVE_SCALE * abs(middle))
        return middle + self.threshold * scale if scale else math.inf

    def release(self, runner: Runner) -> None:
        """Unsubscribe from the losses."""
        if self._collect in runner.meter.on_read:
            runner.meter.on_read.remove(self._collect)
