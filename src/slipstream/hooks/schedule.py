"""Parameter schedules, early stopping, cache and buffer upkeep."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import torch

from slipstream.dist import all_reduce_params, get_world_size
from slipstream.errors import ConfigError, did_you_mean
from slipstream.hooks.hook import Hook
from slipstream.registry import HOOKS

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["EarlyStoppingHook", "EmptyCacheHook", "ParamSchedulerHook", "SyncBuffersHook", "better", "pick"]


@HOOKS.register_module()
class ParamSchedulerHook(Hook):
    """Step the schedulers: by iteration after each step, by epoch after each epoch, on metrics after validation."""

    priority = "LOW"

    def before_train(self, runner: Runner) -> None:
        """Sort the schedulers once."""
        schedulers = runner.all_param_schedulers
        self._on_metrics = [s for s in schedulers if getattr(s, "need_val_args", False)]
        self._by_epoch = [s for s in schedulers if s.by_epoch]  # those on metrics count epochs too
        self._by_iter = [s for s in schedulers if not s.by_epoch]

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Step the schedulers that count iterations."""
        for scheduler in self._by_iter:
            scheduler.step()

    def after_train_epoch(self, runner: Runner) -> None:
        """Step the schedulers that count epochs."""
        for scheduler in self._by_epoch:
            scheduler.step()

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Step the schedulers that watch a metric."""
        for scheduler in self._on_metrics if runner.is_training else ():
            scheduler.step(metrics)


_LESS = re.compile(r"loss|error|perplexity|(?<![a-z])(err|wer|mae|mse|rmse)(?![a-z])")
_GREATER = re.compile(
    r"accuracy|iou|dice|precision|recall|psnr|ssim|(?<![a-z])([abm]?acc|accu|top|m?ap|map|auc|f|auroc)(?![a-z])"
)


def better(key: str, rule: str | None) -> str:
    """Return `greater` or `less`: `rule` if given, else what the metric's name says.

    Raises:
        ConfigError: the name says neither.
    """
    if rule is not None:
        if rule not in ("greater", "less"):
            raise ConfigError(f"must be 'greater' or 'less', not {rule!r}", "rule")
        return rule
    name = key.lower()
    less, greater = _LESS.search(name) is not None, _GREATER.search(name) is not None
    if less != greater:
        return "less" if less else "greater"
    raise ConfigError(f"must be 'greater' or 'less', since the name '{key}' does not tell", "rule")


def pick(hook: Hook, metrics: dict[str, float], key: str, option: str) -> float:
    """Return the metric `key`, or raise an error that names those there are."""
    if key not in metrics:
        message = (
            f"there is no metric '{key}'{did_you_mean(key, metrics)}; validation gives {sorted(metrics)}"
        )
        raise hook.wrong(message, option)
    try:
        return float(metrics[key])
    except (TypeError, ValueError):
        raise hook.wrong(f"the metric '{key}' is no number but {metrics[key]!r}", option) from None


@HOOKS.register_module()
class EarlyStoppingHook(Hook):
    """End the training when a metric has not improved for `patience` validations.

    Args:
        monitor: the metric's name.
        rule: `greater` or `less` is better; by default the name decides.
        min_delta: what counts as an improvement.
        strict: whether a missing metric is an error, or else only stops the watching.
        check_finite: stop as soon as the metric is NaN or infinite.
        patience: validations without improvement before the end.
        stopping_threshold: stop as soon as the metric is this good.
    """

    priority = "LOWEST"

    def __init__(
        self,
        monitor: str,
        rule: str | None = None,
        min_delta: float = 0.1,
        strict: bool = False,
        check_finite: bool = True,
        patience: int = 5,
        stopping_threshold: float | None = None,
    ) -> None:
        if patience < 0:
            raise ConfigError(f"must not be negative, not {patience}", "patience")
        self.monitor, self.rule = monitor, better(monitor, rule)
        self.min_delta, self.strict, self.check_finite = min_delta, strict, check_finite
        self.patience, self.stopping_threshold = patience, stopping_threshold
        self._sign = 1 if self.rule == "greater" else -1

    def before_run(self, runner: Runner) -> None:
        """Start without a best score; a resumed run brings its own."""
        self._best, self._waited = -math.inf, 0

    def before_train(self, runner: Runner) -> None:
        """Take over best score and patience from a resumed run."""
        self._best, self._waited = runner.message_hub.get_info(self._key, (self._best, self._waited))

    @property
    def _key(self) -> str:
        return f"early_stopping/{self.monitor}"

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Compare the metric with the best so far."""
        if not runner.is_training:
            return
        if self.monitor not in (metrics or {}) and not self.strict:
            runner.logger.warning(f"EarlyStoppingHook: validation gives no metric '{self.monitor}'")
            return
        value = pick(self, metrics or {}, self.monitor, "monitor")
        reason = self._reason(self._sign * value)
        runner.message_hub.update_info(self._key, (self._best, self._waited))
        if reason:
            runner.logger.info(f"Stopping early: {self.monitor} = {value:.4g} {reason}")
            runner.train_loop.stop_training = True

    def _reason(self, score: float) -> str:
        if self.check_finite and not math.isfinite(score):
            return "is not finite"
        if self.stopping_threshold is not None and score >= self._sign * self.stopping_threshold:
            return f"has reached {self.stopping_threshold:.4g}"
        if score > self._best + self.min_delta:
            self._best, self._waited = score, 0
            return ""
        self._waited += 1
        return f"has not improved for {self._waited} validations" if self._waited >= self.patience else ""


@HOOKS.register_module()
class EmptyCacheHook(Hook):
    """Give the accelerator's cached memory back before or after epochs or after steps."""

    def __init__(
        self, before_epoch: bool = False, after_epoch: bool = True, after_iter: bool = False
    ) -> None:
        self._before, self._after, self._each = before_epoch, after_epoch, after_iter

    def _before_epoch(self, runner: Runner, mode: str = "train") -> None:
        self._empty(self._before)

    def _after_epoch(self, runner: Runner, mode: str = "train") -> None:
        self._empty(self._after)

    def _after_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None, mode: str = "train"
    ) -> None:
        self._empty(self._each)

    @staticmethod
    def _empty(wanted: bool) -> None:
        if wanted and torch.accelerator.is_available():
            torch.accelerator.memory.empty_cache()


@HOOKS.register_module()
class SyncBuffersHook(Hook):
    """Average floating-point buffers (BatchNorm statistics) over the ranks at the end of each epoch."""

    def after_train_epoch(self, runner: Runner) -> None:
        """Average the buffers."""
        if get_world_size() > 1:
            all_reduce_params((b for b in runner.model.buffers() if b.is_floating_point()), op="mean")
