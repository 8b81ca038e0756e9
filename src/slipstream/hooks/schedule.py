"""Hooks for parameter schedulers, monitored metrics, memory caches and buffer synchronization."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from slipstream.dist import all_reduce_params, get_world_size
from slipstream.errors import did_you_mean
from slipstream.evaluator import TorchMetric
from slipstream.hooks.hook import Hook
from slipstream.optim.scheduler import all_schedulers
from slipstream.registry import HOOKS
from slipstream.typecheck import NonNegative, NonNegativeInt, check, matches

if TYPE_CHECKING:
    from slipstream.runner import Runner


@HOOKS.register_module()
class ParamSchedulerHook(Hook):
    """Step the schedulers after each iteration, epoch or validation run, depending on the scheduler."""

    priority = "LOW"

    def before_train(self, runner: Runner) -> None:
        """Group the schedulers by type: iteration-based, epoch-based and metric-based."""
        schedulers = all_schedulers(runner.param_schedulers)
        self._on_metrics = [s for s in schedulers if getattr(s, "need_val_args", False)]
        self._by_epoch = [s for s in schedulers if s.by_epoch]  # includes metric-based schedulers
        self._by_iter = [s for s in schedulers if not (s.by_epoch or getattr(s, "per_update", False))]
        # Each optimizer has its own accumulation windows.
        optim, parts = runner.optim_wrapper, runner.param_schedulers
        parts = parts if isinstance(parts, dict) else {"": parts or []}
        windows = {name: (optim[name] if name else optim).accumulation for name in parts}  # type: ignore[index,union-attr]
        self._per_update = [
            (s, windows[name]) for name in parts for s in parts[name] if getattr(s, "per_update", False)
        ]
        self._updates = [window.start for _, window in self._per_update]

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict[str, Any] | None = None
    ) -> None:
        """Step the iteration-based schedulers."""
        for scheduler in self._by_iter:
            scheduler.step()
        for index, (scheduler, window) in enumerate(self._per_update):
            if window.start != self._updates[index]:  # the batch has ended an accumulation window
                self._updates[index] = window.start
                scheduler.step()

    def after_train_epoch(self, runner: Runner) -> None:
        """Step the epoch-based schedulers."""
        for scheduler in self._by_epoch:
            scheduler.step()

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Step the schedulers that monitor a metric."""
        for scheduler in self._on_metrics if runner.is_training else ():
            scheduler.step(metrics)


_LESS = r"loss|error|perplexity|(?<![a-z])(err|wer|mae|mse|rmse)(?![a-z])"
_GREATER = r"accuracy|iou|dice|precision|recall|psnr|ssim|(?<![a-z])([abm]?acc|accu|top|m?ap|map|auc|f|auroc)(?![a-z])"


Rule = Literal["greater", "less"] | None


def implied_rule(key: str) -> str | None:
    """Return the rule that a metric's name implies, such as `less` for a loss; None if the name is ambiguous."""
    less, greater = (re.search(pattern, key.lower()) is not None for pattern in (_LESS, _GREATER))
    return None if less == greater else "less" if less else "greater"


def infer_rule(hook: Any, runner: Runner, key: str) -> str:
    """Return the hook's `rule`, what torchmetrics declares (`higher_is_better`), or what the metric's name implies.

    Raises:
        ConfigError: if the rule is not set, and the name is ambiguous.
    """
    loop = runner.val_loop
    if hook.rule is not None:
        return str(hook.rule)
    evaluators = getattr(loop, "evaluators", {"": getattr(loop, "evaluator", None)})
    loader = next((name for name in evaluators if name and key.startswith(f"{name}/")), "")
    name = key.removeprefix(f"{loader}/") if loader else key
    for metric in getattr(evaluators.get(loader), "metrics", ()):
        better = metric.higher_is_better(name) if isinstance(metric, TorchMetric) else None
        if better is not None:
            return "greater" if better else "less"
    if (implied := implied_rule(name)) is None:
        raise hook.config_error(
            f"cannot infer the rule from the metric's name '{key}'; set rule to 'greater' or 'less'", "rule"
        )
    return implied


def require_rule(hook: Any, runner: Runner, key: str) -> str:
    """Return `infer_rule`, and warn if the Runner has no validation; for `before_train`."""
    if runner.val_loop is None:
        runner.logger.warning(
            f"{type(hook).__name__}: '{key}' has no effect, because the Runner has no validation"
        )
    return infer_rule(hook, runner, key)


def metric_value(hook: Hook, metrics: dict[str, float], key: str, option: str) -> float:
    """Return the metric `key` as a float, or raise an error that lists the available metrics."""
    if key not in metrics:
        message = f"unknown metric '{key}': validation returned {sorted(metrics)}{did_you_mean(key, metrics)}"
        raise hook.config_error(message, option)
    try:
        return float(metrics[key])
    except (TypeError, ValueError):
        raise hook.config_error(
            f"the metric '{key}' must be a number, not {metrics[key]!r}", option
        ) from None


@HOOKS.register_module()
class MonitorCheckHook(Hook):
    """Raise an error if validation does not return the metrics that select the best checkpoints.

    This hook replaces a CheckpointHook in runs that save no checkpoints (`fast_dev_run` and `slipstream check`).

    Args:
        save_best: the names of the metrics.
    """

    priority = "VERY_LOW"  # as CheckpointHook, after hooks that add metrics

    def __init__(self, save_best: list[str]) -> None:
        self.save_best = save_best

    @staticmethod
    def config_for(hook: Any) -> dict[str, Any] | None:
        """Return the configuration of the hook that replaces a CheckpointHook or its configuration.

        The result is None if the hook names no metric.
        """
        metrics = hook.get("save_best") if isinstance(hook, Mapping) else getattr(hook, "monitors", None)
        names = [metrics] if isinstance(metrics, str) else metrics
        if not isinstance(names, list | tuple) or not matches(list(names), list[str]):
            return None
        names = [name for name in names if name != "auto"]
        return {"type": "MonitorCheckHook", "save_best": names} if names else None

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Check the metrics that validation returned."""
        if metrics:
            for name in self.save_best:
                metric_value(self, metrics, name, "save_best")


@HOOKS.register_module()
class EarlyStoppingHook(Hook):
    """Stop training if a metric has not improved for `patience` validation runs.

    If validation runs within epochs, training stops after the validation run, in the middle of an epoch.

    Args:
        monitor: name of the metric to monitor, such as `loss`, or `NAME/loss` for the validation loader `NAME`.
        rule: `greater` if higher values are better, `less` if lower values are. Default: what torchmetrics declares, or
            what the name implies.
        min_delta: minimum change that counts as an improvement.
        strict: raise an error if validation does not return the metric; otherwise log a warning.
        check_finite: stop as soon as the metric is NaN or infinite.
        patience: number of validation runs without improvement before training stops.
        stopping_threshold: stop as soon as the metric reaches this value.
    """

    priority = "LOWEST"

    def __init__(
        self,
        monitor: str,
        rule: str | None = None,
        min_delta: NonNegative = 0.1,
        strict: bool = True,
        check_finite: bool = True,
        patience: NonNegativeInt = 5,
        stopping_threshold: float | None = None,
    ) -> None:
        check(patience, NonNegativeInt, "patience")
        check(min_delta, NonNegative, "min_delta")
        check(rule, Rule, "rule")
        self.monitor, self.rule = monitor, rule
        self.min_delta, self.strict, self.check_finite = min_delta, strict, check_finite
        self.patience, self.stopping_threshold = patience, stopping_threshold

    def before_run(self, runner: Runner) -> None:
        """Reset the best score and the patience counter."""
        self._best, self._num_unimproved = -math.inf, 0

    def before_train(self, runner: Runner) -> None:
        """Restore the best score and the patience counter if the run was resumed."""
        self._sign = 1 if require_rule(self, runner, self.monitor) == "greater" else -1
        self._best, self._num_unimproved = runner.message_hub.get_info(
            self._key, (self._best, self._num_unimproved)
        )

    @property
    def _key(self) -> str:
        return f"early_stopping/{self.monitor}"

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Compare the metric with its best value, and stop training if required."""
        if not runner.is_training:
            return
        if self.monitor not in (metrics or {}) and not self.strict:
            runner.logger.warning(
                f"EarlyStoppingHook: validation did not return the metric '{self.monitor}'; check `monitor`"
            )
            return
        value = metric_value(self, metrics or {}, self.monitor, "monitor")
        reason = self._reason(self._sign * value)
        runner.message_hub.update_info(self._key, (self._best, self._num_unimproved))
        if reason:
            runner.logger.info(f"Stopping early: {self.monitor} = {value:.4g} {reason}")
            runner.train_loop.stop_training = True

    def _reason(self, score: float) -> str:
        if self.check_finite and not math.isfinite(score):
            return "is not finite"
        if self.stopping_threshold is not None and score >= self._sign * self.stopping_threshold:
            return f"has reached {self.stopping_threshold:.4g}"
        if score > self._best + self.min_delta:
            self._best, self._num_unimproved = score, 0
            return ""
        self._num_unimproved += 1
        if self._num_unimproved < self.patience:
            return ""
        return (
            f"has not improved for {self._num_unimproved} validation run{'s' * (self._num_unimproved != 1)}"
        )


@HOOKS.register_module()
class EmptyCacheHook(Hook):
    """Empty the accelerator's memory cache before or after epochs, or after steps."""

    def __init__(
        self, before_epoch: bool = False, after_epoch: bool = True, after_iter: bool = False
    ) -> None:
        self._before_epoch_enabled, self._after_epoch_enabled = before_epoch, after_epoch
        self._after_iter_enabled = after_iter

    def _before_epoch(self, runner: Runner, mode: str = "train") -> None:
        self._empty(self._before_epoch_enabled)

    def _after_epoch(self, runner: Runner, mode: str = "train") -> None:
        self._empty(self._after_epoch_enabled)

    def _after_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None, mode: str = "train"
    ) -> None:
        self._empty(self._after_iter_enabled)

    @staticmethod
    def _empty(enabled: bool) -> None:
        if enabled and torch.accelerator.is_available():
            torch.accelerator.memory.empty_cache()


@HOOKS.register_module()
class SyncBuffersHook(Hook):
    """Average floating-point buffers (such as BatchNorm statistics) over the ranks at the end of each epoch."""

    def after_train_epoch(self, runner: Runner) -> None:
        """Average the buffers."""
        if get_world_size() > 1:
            all_reduce_params((b for b in runner.model.buffers() if b.is_floating_point()), op="mean")
