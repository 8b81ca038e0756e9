"""Detect losses far above the recent values, and warn or roll back to a checkpoint."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any, Literal

from slipstream.dist import all_gather_object
from slipstream.errors import ConfigError, LossSpikeError, did_you_mean
from slipstream.hooks.checkpoint import warn_without_checkpoints
from slipstream.hooks.hook import Hook
from slipstream.registry import HOOKS
from slipstream.typecheck import NonNegativeInt, PositiveInt, Rule, check, matches

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["LossSpikeHook"]

_Positive = Annotated[float, Rule(lambda value: value > 0, "above 0")]
_MAD_TO_STD = 1.4826
"""1 / (0.75 quantile of the normal distribution). For normally distributed values, the standard deviation is the MAD
times this factor."""
_MIN_RELATIVE_SCALE = 0.01
"""The scale is at least this fraction of the median, so that rounding errors in a constant loss do not count as
spikes."""


@HOOKS.register_module()
class LossSpikeHook(Hook):
    """Warn or roll back to a checkpoint if the loss rises far above its recent values.

    The loss of a step is a spike if it exceeds

        median + threshold * scale,  scale = max(1.4826 * MAD, 0.01 * |median|)

    where MAD is the median of the absolute deviations from the median. The median and the MAD are computed over the
    last `window` losses before the step. This rule is based on the modified z-score of B. Iglewicz and D. Hoaglin (*How
    to Detect and Handle Outliers*, 1993), who propose a threshold of 3.5 for normally distributed values. Per-batch
    losses have heavier tails, so the default threshold is higher. Unlike the mean and the standard deviation, the
    median and the MAD change little if up to half of the values are spikes.

    The hook checks the losses when the Runner reads them, at log intervals and before checkpoints, so it does not add a
    device synchronization to training steps. With several processes, the hook uses the mean of their losses.

    `rollback` works as in `nan_guard`: the run continues from its last good checkpoint, and skips the batches of all
    steps from the optimizer update before the spike through the last step whose loss has been read. This update is
    also skipped because it may have caused the spike. Chowdhery et al., *PaLM: Scaling Language Modeling with Pathways*
    (2022), section 5.1, describe this remedy: they restart about 100 steps before the spike and skip 200 to 500
    batches.

    Args:
        action: `warn` logs one warning for each spike. `rollback` restores a checkpoint.
        monitor: name of the loss to monitor, as returned by the model.
        window: number of recent losses from which the median and the MAD are computed.
        threshold: factor that multiplies the scale in the formula above.
        min_history: minimum number of recorded losses before spikes can be detected; at most `window`.
        patience: number of consecutive steps whose loss must exceed the limit to count as a spike.
        max_rollbacks: maximum number of rollbacks in a run; at the next spike, the run stops with `LossSpikeError`.
        skip_before: number of additional batches to skip before the spike.
    """

    def __init__(
        self,
        action: Literal["warn", "rollback"] = "warn",
        monitor: str = "loss",
        window: PositiveInt = 200,
        threshold: _Positive = 10.0,
        min_history: PositiveInt = 50,
        patience: PositiveInt = 1,
        max_rollbacks: PositiveInt = 3,
        skip_before: NonNegativeInt = 0,
    ) -> None:
        check(action, Literal["warn", "rollback"], "action")
        check(monitor, str, "monitor")
        for name, value in {
            "window": window,
            "min_history": min_history,
            "patience": patience,
            "max_rollbacks": max_rollbacks,
        }.items():
            check(value, PositiveInt, name)
        check(threshold, _Positive, "threshold")
        check(skip_before, NonNegativeInt, "skip_before")
        if min_history > window:
            raise ConfigError(f"must be at most window={window}, not {min_history}", "min_history")
        self.action, self.monitor = action, monitor
        self.window, self.threshold, self.min_history = window, threshold, min_history
        self.patience, self.max_rollbacks, self.skip_before = patience, max_rollbacks, skip_before
        self._cleanup = ExitStack()
        self._losses: deque[float] = deque(maxlen=window)
        self._above = 0  # number of consecutive losses above the limit
        self._first = 0  # the step of the first of these losses
        self._pending: list[tuple[int, float]] = []
        self._names: set[str] = set()

    def before_run(self, runner: Runner) -> None:
        """Subscribe to the losses that are read for logging."""
        self.release(runner)
        if runner.optim_wrapper is None:
            return
        runner.meter.on_read.append(self._collect)
        self._cleanup.callback(runner.meter.on_read.remove, self._collect)
        if self.action == "rollback":
            runner.rollback.enable(LossSpikeError, self.max_rollbacks, self.skip_before)
            self._cleanup.callback(runner.rollback.disable, LossSpikeError)

    def before_train(self, runner: Runner) -> None:
        """Restore the recent losses if the run was resumed."""
        self._restore(runner)
        if self.action == "rollback":
            warn_without_checkpoints(runner, "LossSpikeHook")

    def after_rollback(self, runner: Runner) -> None:
        """Restore the recent losses from the checkpoint."""
        self._restore(runner)

    def _restore(self, runner: Runner) -> None:
        saved = runner.message_hub.get_info(self._key)
        losses, above, first = saved if matches(saved, list[Any]) and len(saved) == 3 else ([], 0, 0)
        self._losses.clear()
        self._losses.extend(losses if matches(losses, list[float]) else ())
        known = matches(above, NonNegativeInt) and matches(first, PositiveInt)
        self._above, self._first = (above, first) if known else (0, 0)
        self._pending = []

    @property
    def _key(self) -> str:
        return f"loss_spike/{self.monitor}"

    def _collect(self, steps: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        self._names.update(*(outputs for _, outputs in steps))
        self._pending += [
            (number, outputs[self.monitor]) for number, outputs in steps if self.monitor in outputs
        ]

    def read_logs(self, runner: Runner) -> None:
        """Check for spikes in the losses that were read.

        Raises:
            LossSpikeError: if there is a spike and the action is `rollback`.
            ConfigError: if the model does not return the monitored loss.
        """
        if self._names and self.monitor not in self._names:
            hint = did_you_mean(self.monitor, self._names)
            raise self.config_error(
                f"the model does not return '{self.monitor}'{hint}; use one of {sorted(self._names)}",
                "monitor",
            )
        pending, self._pending = self._pending, []
        steps = _mean_by_step(all_gather_object(pending))
        spikes: list[tuple[int, str]] = []
        for number, loss in steps:
            limit = self._limit()
            if loss > limit:
                self._first = number if self._above == 0 else self._first
                self._above += 1
                if self._above == self.patience:
                    spikes.append((self._first, self._describe(number, loss)))
            else:
                self._above = 0
            self._losses.append(loss)
        runner.message_hub.update_info(self._key, [list(self._losses), self._above, self._first])
        if spikes and self.action == "rollback":
            first, text = spikes[0]
            raise LossSpikeError(text, first, steps[-1][0])
        for _, text in spikes:
            runner.logger.warning(text)

    def _limit(self) -> float:
        """Return the limit for the next loss, or infinity if there are too few losses or most of them are 0."""
        if len(self._losses) < self.min_history:
            return math.inf
        median = _median(self._losses)
        spread = _median(abs(loss - median) for loss in self._losses)
        scale = max(_MAD_TO_STD * spread, _MIN_RELATIVE_SCALE * abs(median))
        return median + self.threshold * scale if scale else math.inf

    def _describe(self, number: int, loss: float) -> str:
        steps = f" for {self.patience} consecutive steps" if self.patience > 1 else ""
        return (
            f"'{self.monitor}' rose to {loss:.4g} at iteration {number}, above the limit of {self._limit():.4g}"
            f"{steps} (the median of the last {len(self._losses)} losses is {_median(self._losses):.4g}). Lower the "
            "learning rate or clip the gradients (clip_grad=dict(max_norm=1.0)), or check the data"
        )

    def release(self, runner: Runner) -> None:
        """Unsubscribe from the losses."""
        self._cleanup.close()


def _median(values: Iterable[float]) -> float:
    from statistics import (
        median,  # imported here, because `statistics` imports decimal and fractions, which are slow to import
    )

    return median(values)


def _mean_by_step(ranks: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, float]]:
    """Return the mean loss over the ranks for each step, in step order; non-finite losses are excluded."""
    losses: dict[int, list[float]] = {}
    for rank in ranks:
        for number, loss in rank:
            if math.isfinite(loss):
                losses.setdefault(number, []).append(loss)
    return [(number, sum(values) / len(values)) for number, values in sorted(losses.items())]
