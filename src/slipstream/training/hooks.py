"""Hooks of SuperGradients' ways: a callback on the batch, test sets during training, what resuming leaves out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from slipstream.dataset.loading.loader import build_dataloader
from slipstream.dataset.loading.workers import end_workers
from slipstream.errors import DataError
from slipstream.hooks import Hook
from slipstream.model import unwrap_model
from slipstream.registry import HOOKS

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["HistoryHook", "NewOptimizerHook", "PrePredictionHook", "TestLoadersHook"]


@HOOKS.register_module()
class NewOptimizerHook(Hook):
    """Let a resumed run go on with its weights, epoch and learning rates, but with an optimizer that begins anew."""

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        """Put what the optimizer is at the start in the place of its state, at the learning rates of the schedule."""
        if not runner.resuming or "optimizer" not in checkpoint:
            return
        assert runner.optim_wrapper is not None, "a training has one"
        anew = runner.optim_wrapper.state_dict()
        groups = checkpoint["optimizer"]["param_groups"]
        for own, saved in zip(anew["param_groups"], groups, strict=False):  # schedules compare how many
            own["lr"] = saved["lr"]
        checkpoint["optimizer"] = anew


class PrePredictionHook(Hook):
    """Let a function of SuperGradients change each batch of the training on the device, right before the step.

    Args:
        callback: `callback(inputs, targets, batch_idx)` returns the new inputs and targets.
    """

    def __init__(self, callback: Callable[[Any, Any, int], tuple[Any, Any]]) -> None:
        self.callback = callback

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """Put what the function returns in the place of the batch's inputs and targets."""
        model: Any = unwrap_model(runner.model)
        ready = model.data_preprocessor(data_batch, True)
        if isinstance(data_batch, dict):
            inputs, targets = self.callback(ready["inputs"], ready["targets"], batch_idx)
            data_batch.clear()
            data_batch.update({**ready, "inputs": inputs, "targets": targets})
        elif isinstance(data_batch, list):
            data_batch[:] = [*self.callback(ready[0], ready[1], batch_idx), *ready[2:]]
        else:
            raise DataError(
                f"pre_prediction_callback needs batches that are dicts or lists, not {type(data_batch).__name__}: "
                "let collate_fn return one"
            )


class TestLoadersHook(Hook):
    """Evaluate further data sets during a training, one after the other, as the Runner's test.

    The Runner needs a test of its own: its metrics are taken, and their names get the data set's before them.

    Args:
        loaders: a data loader for each name.
        interval: epochs between two evaluations.
    """

    __test__ = False  # no test of pytest's
    priority = "LOWEST"  # after the checkpoint, which must not wait

    def __init__(self, loaders: Mapping[str, Any], interval: int = 1) -> None:
        self.loaders = dict(loaders)
        self.interval = interval

    def before_train(self, runner: Runner) -> None:
        """Bring the loaders under the run's seed."""
        for name, loader in self.loaders.items():
            self.loaders[name] = build_dataloader(loader, runner.seed, f"test_loaders.{name}", training=False)

    def after_train_epoch(self, runner: Runner) -> None:
        """Evaluate, if this epoch is due."""
        if not self.every_n_epochs(runner, self.interval):
            return
        loop = runner.test_loop
        own, metrics = loop.dataloader, loop.evaluator.metrics
        prefixes = [metric.prefix for metric in metrics]
        for name, loader in self.loaders.items():
            loop.dataloader = loader
            for metric, prefix in zip(metrics, prefixes, strict=True):
                metric.prefix = f"{name}/{prefix}" if prefix else name
            loop.run()
        loop.dataloader = own
        for metric, prefix in zip(metrics, prefixes, strict=True):
            metric.prefix = prefix

    def after_train(self, runner: Runner) -> None:
        """End the loaders' processes."""
        for loader in self.loaders.values():
            end_workers(loader)


class HistoryHook(Hook):
    """Keep the metrics of every validation of a training."""

    priority = "LOWEST"

    def __init__(self) -> None:
        self.history: list[dict[str, float]] = []

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Append the metrics, with the number of epochs that are done."""
        if runner.is_training:
            self.history.append({"epoch": runner.epoch, **(metrics or {})})
