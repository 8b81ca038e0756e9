"""Hooks for SuperGradients' batch callback, tests during training, optimizer reset on resume, and metric history."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from slipstream.checkpoint import OPTIMIZER, check
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
    """Resume the weights, the epoch and the learning rates, but start with a new optimizer state."""

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        """Replace the saved optimizer state with the initial state, but keep the saved learning rates."""
        if not runner.checkpoints.resuming or "optimizer" not in checkpoint:
            return
        assert runner.optim_wrapper is not None, "training requires an optim_wrapper"
        initial_state = runner.optim_wrapper.state_dict()
        check(checkpoint["optimizer"], OPTIMIZER, "the resumed checkpoint", "optimizer")
        groups = checkpoint["optimizer"]["param_groups"]
        # Not strict, because the schedulers check the number of groups.
        for own, saved in zip(initial_state["param_groups"], groups, strict=False):
            own["lr"] = saved.get("lr", own["lr"])
        checkpoint["optimizer"] = initial_state


class PrePredictionHook(Hook):
    """Call a function with each training batch after its transfer to the device, right before the training step.

    Args:
        callback: `callback(inputs, targets, batch_idx)` returns the new inputs and targets.
    """

    def __init__(self, callback: Callable[[Any, Any, int], tuple[Any, Any]]) -> None:
        self.callback = callback

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """Replace the inputs and targets of the batch with the function's results."""
        model: Any = unwrap_model(runner.model)
        batch = model.data_preprocessor(data_batch, True)
        if isinstance(data_batch, dict):
            inputs, targets = self.callback(batch["inputs"], batch["targets"], batch_idx)
            data_batch.clear()
            data_batch.update({**batch, "inputs": inputs, "targets": targets})
        elif isinstance(data_batch, list):
            data_batch[:] = [*self.callback(batch[0], batch[1], batch_idx), *batch[2:]]
        else:
            raise DataError(
                f"pre_prediction_callback requires batches that are dicts or lists, not {type(data_batch).__name__}; "
                "change collate_fn so that it returns a dict or a list"
            )


class TestLoadersHook(Hook):
    """Evaluate additional datasets during training with the Runner's test loop.

    The Runner must have a test loop. The hook uses the metrics of that loop, with the dataset's name as a prefix.

    Args:
        loaders: data loaders by name.
        interval: number of epochs between evaluations.
    """

    __test__ = False  # prevents pytest from collecting this class
    priority = "LOWEST"  # runs after the checkpoint is written

    def __init__(self, loaders: Mapping[str, Any], interval: int = 1) -> None:
        self.loaders = dict(loaders)
        self.interval = interval

    def before_train(self, runner: Runner) -> None:
        """Rebuild the loaders with the run's seed."""
        for name, loader in self.loaders.items():
            self.loaders[name] = build_dataloader(loader, runner.seed, f"test_loaders.{name}", training=False)

    def after_train_epoch(self, runner: Runner) -> None:
        """Evaluate all loaders every `interval` epochs."""
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
        """Terminate the loaders' worker processes."""
        for loader in self.loaders.values():
            end_workers(loader)


class HistoryHook(Hook):
    """Record the metrics of each validation run during training."""

    priority = "LOWEST"

    def __init__(self) -> None:
        self.history: list[dict[str, float]] = []

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Append the metrics and the number of completed epochs."""
        if runner.is_training:
            self.history.append({"epoch": runner.epoch, **(metrics or {})})
